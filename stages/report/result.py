"""The result: base against tuned, where it changed, best and worst rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.report import charts, words
from stages.report.html import Markup, join, table, tag
from stages.report.inputs import Inputs
from stages.report.section import Section, absent, heading

Metrics = Mapping[str, Any]
KEY = join(
    [
        tag("i", class_="key dots ring"),
        "base ",
        tag("i", class_="key dots s1"),
        "tuned",
    ]
)


def section(inputs: Inputs) -> Section:
    """Base against tuned over every target."""
    metrics = inputs.metrics
    if metrics is None:
        return Section("result", "Result", absent("The comparison with the base model", "evaluate"))
    ends = [metrics[f"loss_change{end}"] for end in ("", "_low", "_high")]
    left = tag("div", comparison(metrics), charts.interval(*ends), apart(metrics))
    right = charts.scatter(inputs.rows) if inputs.rows is not None and len(inputs.rows) else None
    lengths, positions = metrics.get("by_length", []), metrics.get("by_position", [])
    body = [
        tag("div", left, right, class_="grid2"),
        by_class("By length of the row", "tokens of the row", lengths),
        by_class("By position of the target", "tokens before it", positions),
        extremes(inputs.samples or {}),
    ]
    split = metrics.get("split", inputs.settings.evaluate.split)
    lead = (
        f"{words.plural(metrics['rows'], 'row')} of the {split} split,"
        f" {words.plural(metrics['targets'], 'target')}; each target counts once. Loss in nats per"
        " target, perplexity = exp(loss)."
    )
    return Section("result", "Result", join(body), lead)


def comparison(metrics: Metrics) -> Markup:
    """Base, tuned and change."""
    base, tuned = metrics["base"], metrics["tuned"]
    rows = [_totals(name, m) for name, m in (("base", base), ("tuned", tuned))]
    ratio = tuned["perplexity"] / base["perplexity"] - 1
    low, high = (words.signed(metrics[f"loss_change_{end}"]) for end in ("low", "high"))
    change = words.signed(metrics["loss_change"])
    accuracy = _points(base, tuned)
    rows.append(["change", change, f"{words.signed(100 * ratio, 1)}%", accuracy])
    note = (
        f"95% interval of the change: {low} to {high} (paired bootstrap over rows,"
        f" {words.count(metrics.get('resamples'))} resamples, fixed seed)."
        f" {words.percent(metrics.get('improved_share'), 0)} of the rows improved."
    )
    columns = ["", "loss", "perplexity", "token accuracy"]
    return join([table(columns, rows, class_="totals"), tag("p", note, class_="note")])


def apart(metrics: Metrics) -> Markup | None:
    """Rows that also stand in train, and the others."""
    leaked = metrics.get("also_in_train") or {}
    if not leaked.get("rows"):
        return None
    rows = []
    for name, key in (("also in train", "also_in_train"), ("not in train", "not_in_train")):
        part = metrics.get(key)
        if part:
            losses = [part["base"]["loss"], part["tuned"]["loss"]]
            cells = [words.count(part["rows"]), words.count(part["targets"])]
            cells += [words.nats(loss) for loss in losses]
            rows.append([name, *cells, words.signed(losses[1] - losses[0])])
    columns = ["", "rows", "targets", "base", "tuned", "change"]
    return join([heading("Rows that also stand in train"), table(columns, rows)])


def by_class(title: str, what: str, classes: Sequence[Metrics]) -> Markup | None:
    """A table over classes, base and tuned joined by a line in its last column."""
    if not classes:
        return None
    with_rows = "rows" in classes[0]
    values = [c[name] for c in classes for name in ("base_loss", "tuned_loss")]
    columns = [what, *(["rows"] if with_rows else []), "targets", "base", "tuned", "change", KEY]
    rows = []
    for c in classes:
        base, tuned = c["base_loss"], c["tuned_loss"]
        counts = [words.count(c["rows"])] if with_rows else []
        counts.append(words.count(c["targets"]))
        losses = [words.nats(base), words.nats(tuned), words.signed(tuned - base)]
        dots = charts.dumbbell(base, tuned, min(values), max(values))
        rows.append([c["tokens"], *counts, *losses, dots])
    return join(
        [heading(title), table(columns, rows, text_columns=(0, len(columns) - 1), class_="classes")]
    )


def extremes(samples: Metrics) -> Markup | None:
    """Rows that gained most, and those that gained least or lost."""
    parts = [
        _rows_table(title, samples.get(key) or [])
        for title, key in (("Gained most", "best"), ("Gained least or lost", "worst"))
    ]
    return join(parts)


def _rows_table(title: str, entries: Sequence[Metrics]) -> Markup | None:
    if not entries:
        return None
    columns = ["change", "base", "tuned", "answer in the data"]
    rows = [
        [
            words.signed(e["tuned_loss"] - e["base_loss"]),
            *(f"{e[name]:.3f}" for name in ("base_loss", "tuned_loss")),
            [tag("span", e["answer"], class_="excerpt"), tag("small", _origin(e))],
        ]
        for e in entries
    ]
    body = table(columns, rows, text_columns=(3,), class_="extremes")
    return join([heading(title), body])


def _origin(entry: Metrics) -> str:
    where = f"{entry['source']}:{entry['line']}"
    return f"{where} · row {entry['row']} · {words.plural(entry['targets'], 'target')}"


def _totals(name: str, m: Metrics) -> list[str]:
    accuracy = words.percent(m.get("token_accuracy"))
    return [name, words.nats(m["loss"]), words.short(m["perplexity"]), accuracy]


def _points(base: Metrics, tuned: Metrics) -> str:
    if "token_accuracy" not in base:
        return words.NONE
    return f"{words.signed(100 * (tuned['token_accuracy'] - base['token_accuracy']), 1)} points"
