"""The result of `python -m stages prove`: how far other cuts are from the plain update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.report import words
from stages.report.html import Markup, join, table, tag
from stages.report.inputs import Inputs
from stages.report.section import Section, badge, heading, notice

PARTS = {
    "cuts": "Gradient of one effective batch, against the plain whole batch",
    "memory": "The same under each memory setting",
    "updates": "A few updates",
    "resume": "Stop and resume",
}
"""Parts of reports/prove.json and their headings, in order."""


def section(inputs: Inputs) -> Section:
    """What was compared, how far it was off, how far it may be."""
    report = inputs.prove
    if report is None:
        hint = tag(
            "p",
            "Not measured. ",
            tag("code", "python -m stages prove"),
            " measures on this model that every way to cut an update takes the same step.",
            class_="absent",
        )
        return Section("proof", "Same step", hint)
    missed = [one for one in report["results"] if one["passed"] is False]
    said = (
        notice("error", f"{words.plural(len(missed), 'comparison')} out of tolerance.")
        if missed
        else notice("ok", "Every way to cut an update took the same step.")
    )
    parts = [_part(part, title, report["results"]) for part, title in PARTS.items()]
    return Section("proof", "Same step", join([said, *parts]), lead(report))


def lead(report: Mapping[str, Any]) -> str:
    """On what it was measured."""
    model, device = report["model"], report["device"]
    batch = words.plural(report["examples"]["effective_batch_size"], "example")
    text = f"Measured on {model['name']}, {model['dtype']}, {device['kind']}, {batch}:"
    text += " ‖a − b‖ / ‖b‖ over all trained arrays, and the relative difference of the loss."
    if not report["float32"]:
        text += f" Two paddings of the whole batch are {words.short(report['paddings'])} apart."
    return text


def _part(part: str, title: str, results: list[Mapping[str, Any]]) -> Markup | None:
    rows = [_row(one) for one in results if one["part"] == part]
    if not rows:
        return None
    columns = ["compared", "measured", "loss", "at most", ""]
    return join([heading(title), table(columns, rows, text_columns=(0, 4), class_="wrap")])


def _row(one: Mapping[str, Any]) -> list[Any]:
    what = join([one["what"], tag("small", one["note"]) if one["note"] else None])
    result = {None: ("not used", "info"), True: ("passed", "ok"), False: ("missed", "error")}
    most = words.NONE if one["measured"] is None else words.short(one["tolerance"])
    numbers = [_number(one["measured"]), _number(one["loss"]), most]
    return [what, *numbers, badge(*result[one["passed"]])]


def _number(value: float | str | None) -> str:
    """Two digits, as text where it is not finite."""
    if value is None:
        return words.NONE
    return value if isinstance(value, str) else "0" if value == 0 else f"{value:.1e}"
