"""reports/card.md: the adapter's card in the Hub's form, YAML front matter and Markdown.

Form: https://huggingface.co/docs/hub/model-cards (metadata keys `base_model`, `library_name`,
`tags`, `datasets`, `metrics`, `model-index`).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from stages.report import page, run, words
from stages.report.inputs import Inputs

MOST_SAMPLES = 3


def build(inputs: Inputs) -> str:
    """The whole card as Markdown."""
    front = yaml.safe_dump(metadata(inputs), sort_keys=False, allow_unicode=True)
    parts = [
        f"# {_plain(page.headline(inputs))}",
        f"{_plain(page.method(inputs))} {_plain(page.verdict(inputs))}",
        _missing(inputs),
        "## Result",
        _result(inputs),
        "## Use",
        _use(inputs),
        "## Training",
        _training(inputs),
        "## Repeat",
        _fenced("\n".join(run.commands(inputs)), "sh"),
        *_samples(inputs),
    ]
    body = "\n\n".join(part for part in parts if part)
    whole = f"---\n{front}---\n\n{body}\n"
    return whole.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair


def metadata(inputs: Inputs) -> dict[str, Any]:
    """The front matter.

    `datasets` holds Hub ids only: any other name would link to a stranger's.
    """
    train = inputs.settings.train
    kind = [] if train.fine_tune_type == "full" else [train.fine_tune_type]
    found: dict[str, Any] = {
        "base_model": _base(inputs),
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", *kind, "samestep"],
    }
    data = inputs.settings.data.path or ""
    if data.startswith("hub:"):
        found["datasets"] = [data.removeprefix("hub:")]
    if inputs.metrics is not None:
        found["metrics"] = ["perplexity"]
        found["model-index"] = [_index(inputs, inputs.metrics)]
    return found


def _index(inputs: Inputs, metrics: dict[str, Any]) -> dict[str, Any]:
    split = metrics.get("split", inputs.settings.evaluate.split)
    name = page.headline(inputs).rpartition(" on ")[2]
    tuned = metrics["tuned"]
    return {
        "name": page.headline(inputs),
        "results": [
            {
                "task": {"type": "text-generation"},
                "dataset": {"name": name, "type": name, "split": split},
                "metrics": [
                    {"type": kind, "name": f"{split} {kind}", "value": round(tuned[kind], 6)}
                    for kind in ("loss", "perplexity")
                ],
            }
        ],
    }


def _base(inputs: Inputs) -> str:
    """The base model's Hub id, else its name."""
    if inputs.manifest is None:
        return inputs.settings.model.repo or "unknown"
    source = inputs.manifest["source"]
    return source["repo"] if source["kind"] == "hub" else inputs.manifest["name"]


def _missing(inputs: Inputs) -> str:
    if not inputs.missing:
        return ""
    return f"**This run is not complete**: nothing there yet from {', '.join(inputs.missing)}."


def _result(inputs: Inputs) -> str:
    m = inputs.metrics
    if m is None:
        return "Not evaluated yet."
    low, high = (words.signed(m[f"loss_change_{end}"]) for end in ("low", "high"))
    lines = ["| | loss (nats per target) | perplexity |", "|---|---:|---:|"]
    for name in ("base", "tuned"):
        lines.append(
            f"| {name} | {words.nats(m[name]['loss'])} | {words.short(m[name]['perplexity'])} |"
        )
    lines.append(f"| change | {words.signed(m['loss_change'])} ({low} to {high}) | |")
    split = m.get("split", inputs.settings.evaluate.split)
    lines += [
        "",
        f"{words.plural(m['rows'], split + ' row')}, {words.plural(m['targets'], 'target')}; in"
        " brackets the 95% interval of a paired bootstrap over rows.",
    ]
    leaked = (m.get("also_in_train") or {}).get("rows")
    if leaked:
        lines.append(f"{words.plural(leaked, 'of these row')} also stand in the training data.")
    return "\n".join(lines)


def _use(inputs: Inputs) -> str:
    """The command that tries it: from the Hub where the base model is there, else from here."""
    hub = inputs.manifest is not None and inputs.manifest["source"]["kind"] == "hub"
    if hub:
        where = "In this folder, with `pip install mlx-lm`:"
        model, folder = _base(inputs), "."
    else:
        where = "In the project that made it:"
        model, folder = '"$(python -m stages.model --path)"', "adapters"
    command = f'mlx_lm.generate --model {model} --adapter-path {folder} --prompt "…"'
    return f"{where}\n\n{_fenced(command, 'sh')}"


def _training(inputs: Inputs) -> str:
    train = inputs.settings.train
    lora = train.lora_parameters
    rows = [
        ("method", train.fine_tune_type),
        ("layers", "all" if train.num_layers == -1 else train.num_layers),
        ("optimizer", train.optimizer),
        ("learning rate", f"{train.learning_rate:g}"),
        ("schedule", train.schedule.name),
        ("effective batch", f"{train.effective_batch_size} examples"),
        ("longest example", f"{inputs.settings.split.max_seq_length} tokens"),
        ("seed", train.seed),
    ]
    if train.fine_tune_type != "full":
        rows.insert(2, ("rank, scale, dropout", f"{lora.rank}, {lora.scale:g}, {lora.dropout:g}"))
    if inputs.training is not None and len(inputs.training.history):
        history = inputs.training.history
        rows.append(("updates", len(history)))
        rows.append(("targets seen", words.count(int(history["targets"].sum()))))
    versions = (inputs.training.run.get("versions") if inputs.training else None) or {}
    rows += [(name, number) for name, number in versions.items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _samples(inputs: Inputs) -> list[str]:
    entries = (inputs.samples or {}).get("samples") or []
    parts = ["## Samples"] if entries else []
    for entry in entries[:MOST_SAMPLES]:
        asked = entry["turns"][-1]["content"] if entry["turns"] else entry["prompt"]
        for label, text in (
            ("Prompt", asked),
            ("Base", entry["base"]["text"]),
            ("Tuned", entry["tuned"]["text"]),
        ):
            parts.append(f"{label}:\n\n{_fenced(text)}")
    return parts


def _fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run_) for run_ in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", text)
