"""The page: masthead with the verdict, contents, sections, one style sheet inside."""

from __future__ import annotations

import re
from pathlib import Path

from stages.report import data, proof, result, run, samples, training, words
from stages.report.html import Markup, join, tag
from stages.report.inputs import Inputs
from stages.report.section import Section, notice

STYLE = Path(__file__).with_name("page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with the page: show it. No script, no request."""
PACKING = re.compile(r"(?<=.)[._-](I?Q\d\w*|F16|F32|BF16)(\.gguf)?$", re.IGNORECASE)
"""How a GGUF file holds its weights, at the end of its name: told under What was run."""


def build(inputs: Inputs) -> str:
    """The whole page as HTML text."""
    sections = [
        result.section(inputs),
        samples.section(inputs),
        training.section(inputs),
        data.section(inputs),
        data.checks(inputs),
        training.machine(inputs),
        proof.section(inputs),
        run.section(inputs),
    ]
    title = headline(inputs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"{title} · samestep"),
        tag("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    body = tag("body", masthead(inputs, title), contents(sections), main(sections), footer())
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def headline(inputs: Inputs) -> str:
    """Which model, on which data."""
    settings = inputs.settings
    name = inputs.manifest["name"] if inputs.manifest else settings.model.repo
    model = PACKING.sub("", name or Path(settings.model.path or "").name)
    path = settings.data.path
    rows = re.split("[/:]", path.rstrip("/"))[-1] if path else "data/source"
    return f"{model} on {rows}"


def masthead(inputs: Inputs, title: str) -> Markup:
    """The headline, the verdict in a sentence and in figures, and what is missing."""
    return tag(
        "header",
        tag("p", "samestep", " · ", "run report", class_="overline"),
        tag("h1", title),
        tag("p", method(inputs), " ", verdict(inputs), class_="lede"),
        figures(inputs),
        missing(inputs),
    )


def method(inputs: Inputs) -> str:
    """What was trained, in a sentence."""
    train = inputs.settings.train
    kind = {"lora": "LoRA", "dora": "DoRA", "full": "full weights"}[train.fine_tune_type]
    if train.fine_tune_type != "full":
        kind = f"{kind} of rank {train.lora_parameters.rank}"
    whole = inputs.manifest["num_layers"] if inputs.manifest else None
    layers = "all" if train.num_layers == -1 else str(train.num_layers)
    of = f" of {whole}" if whole and layers != "all" else ""
    where = f"{layers}{of} layers"
    done = inputs.training is not None and len(inputs.training.history)
    length = f" for {words.plural(len(inputs.training.history), 'update')}" if done else ""
    return f"Fine-tuned with {kind} on {where}{length}."


def verdict(inputs: Inputs) -> str:
    """The change on the evaluated split, in a sentence."""
    m = inputs.metrics
    if m is None:
        return "It has not been compared with the base model yet."
    low, high, change = m["loss_change_low"], m["loss_change_high"], m["loss_change"]
    split = m.get("split", inputs.settings.evaluate.split)
    told = f"On {words.plural(m['rows'], split + ' row')} the loss"
    base, tuned = (f"{m[name]['loss']:.3f}" for name in ("base", "tuned"))
    interval = f"95% interval {words.signed(low, 3)} to {words.signed(high, 3)}"
    if low <= 0 <= high:
        return f"{told} shows no clear change: {base} before, {tuned} after ({interval})."
    return f"{told} {'fell' if change < 0 else 'rose'} from {base} to {tuned} nats ({interval})."


def figures(inputs: Inputs) -> Markup | None:
    """The four numbers that matter."""
    m = inputs.metrics
    if m is None:
        return None
    arrow = Markup(' <span class="to">→</span> ')
    loss = [f"{m[name]['loss']:.3f}" for name in ("base", "tuned")]
    perplexity = [words.short(m[name]["perplexity"]) for name in ("base", "tuned")]
    tiles = [
        ("loss, nats", join([loss[0], tag("b", loss[1])], arrow)),
        ("perplexity", join([perplexity[0], tag("b", perplexity[1])], arrow)),
        ("change of the loss", tag("b", words.signed(m["loss_change"], 3))),
        ("rows improved", tag("b", words.percent(m.get("improved_share"), 0))),
    ]
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles),
        class_="figures",
    )


def missing(inputs: Inputs) -> Markup | None:
    """Says that the run was interrupted, and which stages have not left their files."""
    if not inputs.missing:
        return None
    stages = ", ".join(inputs.missing)
    return notice(
        "warning",
        f"This run is not complete: nothing there yet from {stages}.",
        " The page shows what there is; ",
        tag("code", "dvc repro"),
        " does the rest.",
    )


def contents(sections: list[Section]) -> Markup:
    """Links to the sections."""
    links = [tag("li", tag("a", s.title, href=f"#{s.id}")) for s in sections]
    return tag("nav", tag("ol", *links), aria_label="Contents")


def main(sections: list[Section]) -> Markup:
    """The sections one after another."""
    return tag("main", *(section.markup() for section in sections))


def footer() -> Markup:
    """Where the numbers come from."""
    return tag(
        "footer",
        tag(
            "p",
            "Made by samestep. Losses in nats per target, memory in GB (1e9 bytes), lengths in"
            " tokens. Everything on this page is inside this file.",
        ),
    )
