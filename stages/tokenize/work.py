"""The stage's work: all splits through the tokenizer, every fault of every split named at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core import console, files, paths, tables
from stages.core.config.schema import Tokenize
from stages.core.errors import UserError
from stages.tokenize.rows import Renderer
from stages.tokenize.stream import Fault, Tokenizing
from stages.tokenize.tags import Tags
from stages.tokenize.tally import Tally
from stages.tokenize.template import FIXED_DATE, Template, load_template
from stages.tokenize.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = "conf/templates"
FAULTS_FILE = "tokenize_faults.json"
MOST_LINES_SHOWN = 200


def tokenize(
    raw: Path,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    settings: Tokenize,
) -> dict[str, Any]:
    """Tokenize every split of `raw` into the folder `out`, which appears whole or not at all.

    Args:
        raw: Folder of `train.parquet`, `valid.parquet`, `test.parquet` as collect writes them.
        out: Gets the same names, and side tables in `turns/` (stages.core.tables).
        tokenizer: The model's fast tokenizer, with the chat template to use.
        end_ids: The model's own end ids.
        settings: The group `tokenize`.

    Returns:
        The report.

    Raises:
        UserError: The settings do not fit the rows' forms, or rows cannot be rendered; all of
            them are named.
    """
    template = load_template(tokenizer, settings.chat_template)
    forms = kinds(raw)
    refuse_forms(forms, template, settings)
    vocabulary = read_vocabulary(tokenizer, end_ids, template.answer_footer if template else "")
    tokenizing = Tokenizing(
        renderer=Renderer(template, settings),
        vocabulary=vocabulary,
        tags=Tags(vocabulary.control_words, template),
        end_token=settings.end_token,
    )

    def decode(ids: Sequence[int]) -> str:
        return vocabulary.backend.decode(ids, skip_special_tokens=False)

    tallies = {split: Tally(decode, settings.train_on) for split in tables.SPLITS}
    faults: list[Fault] = []
    with files.replacing_folder(out) as folder:
        for split, tally in tallies.items():
            faults += tokenizing.split(raw / f"{split}.parquet", folder, tally)
        if faults:
            raise fault_error(faults)
    report = {
        "train_on": settings.train_on,
        "end_token": settings.end_token,
        "splits": {split: tally.record() for split, tally in tallies.items()},
        "samples": samples(tallies),
        "notes": notes(template, tokenizing.renderer),
    }
    if settings.chat_template and not paths.inside(settings.chat_template, TEMPLATES):
        report["notes"].append(
            f"tokenize.chat_template lies outside {TEMPLATES}: DVC cannot see when it changes"
        )
    if forms["text"] and vocabulary.end is None and settings.end_token != "never":
        report["notes"].append("the tokenizer names no end-of-text token: texts get none")
    tell(report)
    return report


def kinds(raw: Path) -> Counter[str]:
    """How many rows of each form there are, in all splits."""
    counts: Counter[str] = Counter()
    for split in tables.SPLITS:
        for batch in tables.batches(raw / f"{split}.parquet", ["kind"]):
            counts.update(batch["kind"].to_pylist())
    return counts


def refuse_forms(counts: Counter[str], template: Template | None, settings: Tokenize) -> None:
    """Refuse what no row of a form could go through.

    Raises:
        UserError: Text rows with a masked prompt, or chats without a chat template.
    """
    if settings.train_on == "completion" and counts["text"]:
        raise UserError(
            "tokenize.train_on=completion needs a prompt, and a text row has none to mask",
            where="tokenize.train_on",
            found=f"{counts['text']} text rows of {sum(counts.values())}",
            expected="prompt/completion or chat rows",
            fix="set tokenize.train_on=assistant (every token of a text row is a target), or "
            "give the data prompt and completion columns (data.columns)",
        )
    chats = counts["chat"] + counts["completion"]
    if chats and template is None:
        raise UserError(
            "The model has no chat template (a base model), and rows need one",
            where="tokenize.chat_template",
            found=f"{counts['chat']} chat and {counts['completion']} completion rows",
            expected="a chat template, or text rows only",
            fix="set tokenize.chat_template to a file with a Jinja template (that of the model's "
            "instruct version, say), or choose an instruct model",
        )
    if chats and template is not None and template.disorder:
        raise UserError(
            "The chat template cannot be trained on: where an answer begins is unknown",
            where=settings.chat_template or "the chat template of the model",
            found=template.disorder,
            expected="the turns of a chat in their order, the same text each time",
            fix="mend it, or set tokenize.chat_template to another",
        )


def fault_error(faults: Sequence[Fault]) -> UserError:
    """All rows at fault in one message, grouped by reason; the whole list is kept as a file."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for fault in faults:
        groups[fault.reason, fault.source].append(fault.line)
    lines = [f"{reason}: {source} {spans(at)}" for (reason, source), at in groups.items()]
    file = paths.cache() / FAULTS_FILE
    files.write_json(file, [fault._asdict() for fault in faults])
    where = ""
    if len(lines) > MOST_LINES_SHOWN:
        where = f"the whole list is in {paths.CACHE}/{FAULTS_FILE}"
        lines = [*lines[:MOST_LINES_SHOWN], f"and {len(lines) - MOST_LINES_SHOWN} more"]
    count = "1 row" if len(faults) == 1 else f"{len(faults)} rows"
    return UserError(
        f"{count} cannot be tokenized",
        where=where,
        found="".join(f"\n    {line}" for line in lines),
        expected="rows that the model's chat template renders",
        fix=remedy("\n".join(fault.reason for fault in faults)),
    )


def remedy(reasons: str) -> str:
    """What to do about the reasons given."""
    remedies = {
        "system": "tokenize.system_role=merge puts the system text into the first user turn",
        "tool": "choose a model or a tokenize.chat_template with tools, or take these rows out",
        "reasoning": "choose a tokenize.chat_template that writes reasoning_content, or put the "
        "reasoning into the answer's text",
        "refuses": "mend these rows (roles must alternate, say), or choose another "
        "tokenize.chat_template",
        "surrogate": "take the broken characters out of the source file",
    }
    return "; ".join(text for word, text in remedies.items() if word in reasons.lower())


def spans(lines: Sequence[int]) -> str:
    """Line numbers as text, runs of them joined: `lines 1-3, 7`."""
    ordered = np.unique(lines)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("line " if len(ordered) == 1 else "lines ") + ", ".join(texts)


def samples(tallies: dict[str, Tally]) -> dict[str, dict[str, Any]]:
    """For each form the first split's sample."""
    found: dict[str, dict[str, Any]] = {}
    for split, tally in tallies.items():
        for kind, sample in tally.samples.items():
            found.setdefault(kind, {"split": split, **sample})
    return found


def notes(template: Template | None, renderer: Renderer) -> list[str]:
    """What the template does that a person should know."""
    if template is None:
        return []
    lines = []
    if renderer.without_system and template.default_system:
        lines.append(
            "the chat template gives chats without a system turn its own "
            f"({renderer.without_system}): {template.default_system!r}"
        )
    if template.left_out:
        lines.append(f"the chat template leaves out turns: {', '.join(template.left_out)}")
    if template.writes_date:
        lines.append(f"the chat template writes today's date; here it is always {FIXED_DATE}")
    if renderer.merged:
        lines.append(f"system text put into a user turn: {renderer.merged} chats")
    if renderer.empty_answers:
        lines.append(f"empty assistant turns, which train their end only: {renderer.empty_answers}")
    return lines


def tell(report: dict[str, Any]) -> None:
    """Print what the stage did, and warn of what looks wrong."""
    say: Callable[[str], None] = console.say
    for split, counts in report["splits"].items():
        say(
            f"tokenize {split}: {counts['rows_out']} of {counts['rows_in']} rows, "
            f"{counts['tokens']} tokens, {counts['targets']} targets, longest "
            f"{counts['length']['max']}"
        )
        if counts["rejected"]:
            at = [row["line"] for row in counts["rejected"]]
            console.warn(f"{split}: {len(at)} rows have no target and are left out: {spans(at)}")
        tags = counts["template_tags"]
        if tags["rows"]:
            named = ", ".join(
                f"{tag} ({spans([row['line'] for row in rows])})"
                for tag, rows in tags["examples"].items()
            )
            console.warn(f"{split}: {tags['rows']} rows hold template tags as text: {named}")
    for note in report["notes"]:
        say(note)
