"""What became of the data: rows, targets and lengths by split, and what validate found."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from stages.report import samples, words
from stages.report.html import Markup, join, table, tag
from stages.report.inputs import Inputs
from stages.report.section import Section, absent, badge, heading

SPLITS = ("train", "valid", "test")
ALWAYS = ("rows read", "kept", "tokens", "targets", "targets lost")
MOST_REJECTED = 50
POLICIES = {
    "split": "are cut into pieces, and every target is trained once",
    "truncate_start": "lose their beginning",
    "truncate_end": "lose their end",
    "drop": "are left out",
    "error": "stop the run",
}
LEVELS = {"error": "error", "warning": "warning", "ok": "ok"}


def section(inputs: Inputs) -> Section:
    """Rows, targets and lengths, by split."""
    body: list[Any] = [survival(inputs), lengths(inputs), image(inputs), rejected(inputs)]
    body += [notes(inputs), samples.trained_tokens(inputs)]
    if all(part is None for part in body):
        return Section("data", "Data", absent("Reports on the data", "split"))
    return Section("data", "Data", join(body), lead(inputs))


def lead(inputs: Inputs) -> str:
    """What happens to rows beyond the cap, in a sentence."""
    cap = inputs.settings.split
    what = POLICIES.get(cap.policy, f"go by split.policy={cap.policy}")
    return f"Rows of more than {words.count(cap.max_seq_length)} tokens {what}."


def survival(inputs: Inputs) -> Markup | None:
    """How many rows and targets each stage passed on; what is 0 everywhere is said in a line."""
    if inputs.collect is None:
        return None
    by_split = [_counts(inputs, name) for name in SPLITS]
    empty = [c for c in by_split[0] if c not in ALWAYS and not any(one[c] for one in by_split)]
    columns = [c for c in by_split[0] if c not in empty]
    rows = [
        [name, *(_cell(c, one) for c in columns)]
        for name, one in zip(SPLITS, by_split, strict=True)
    ]
    caption = "Rows and targets that survived"
    none = f"None in any split: {', '.join(empty)}." if empty else None
    shown = table(["split", *columns], rows, caption=caption)
    return join([shown, tag("p", none, class_="note") if none else None])


def _counts(inputs: Inputs, name: str) -> dict[str, int | None]:
    """Column → number of one split; None where nobody has counted."""
    collected, split = _split(inputs.collect, name), _split(inputs.split, name)
    source = split or _split(inputs.tokenize, name)
    return {
        "rows read": collected.get("rows_in"),
        "kept": collected.get("rows_out"),
        "refused": collected.get("rejected_rows", len(collected.get("rejected") or [])),
        "repeats": collected.get("duplicate_rows"),
        "also in train": (inputs.collect.get("leaked_rows") or {}).get(name),
        "tokens": source.get("tokens"),
        "targets": source.get("targets"),
        "targets lost": split.get("targets_lost"),
        "in pieces": split.get("rows_split"),
        "truncated": split.get("rows_truncated"),
        "dropped": split.get("rows_dropped"),
        "end tokens lost": split.get("end_tokens_lost"),
    }


def _cell(column: str, counts: Mapping[str, int | None]) -> str:
    value = counts[column]
    if column == "targets lost" and value:
        return f"{words.count(value)} ({words.percent(value / (value + counts['targets']))})"
    return words.count(value)


def lengths(inputs: Inputs) -> Markup | None:
    """Lengths of the rows in tokens."""
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    rows = []
    for name in SPLITS:
        found = _split(inputs.tokenize, name).get("length")
        if found:
            rows.append([name, *(words.length(found[mark]) for mark in names)])
    if not rows:
        return None
    columns = ["split", "mean", "median", "90%", "95%", "99%", "longest"]
    return join([heading("Lengths in tokens, before the cap"), table(columns, rows)])


def image(inputs: Inputs) -> Markup | None:
    """reports/lengths.png inside the page."""
    if inputs.lengths_png is None:
        return None
    source = "data:image/png;base64," + base64.b64encode(inputs.lengths_png).decode()
    alt = "Histogram of lengths in tokens, with the cap"
    return tag("figure", tag("img", src=source, alt=alt), class_="picture")


def rejected(inputs: Inputs) -> Markup | None:
    """Rows that were left out, with the reason."""
    entries = [
        (name, entry)
        for report in (inputs.collect, inputs.tokenize, inputs.split)
        for name in SPLITS
        for entry in _split(report, name).get("rejected") or []
    ]
    if not entries:
        return None
    rows = [
        [f"{e['source']}:{e['line']}", name, e["reason"]] for name, e in entries[:MOST_REJECTED]
    ]
    rest = len(entries) - MOST_REJECTED
    more = tag("p", f"and {words.count(rest)} more", class_="note") if rest > 0 else None
    summary = tag("summary", f"{words.plural(len(entries), 'row')} left out")
    body = table(["where", "split", "reason"], rows, text_columns=(0, 1, 2))
    return tag("details", summary, body, more)


def notes(inputs: Inputs) -> Markup | None:
    """Remarks of tokenize, and how columns were read."""
    mapped: dict[str, list[str]] = {}
    for one in (inputs.collect or {}).get("mapping") or []:
        mapped.setdefault(f"{one['form']}, {one['mapping']}", []).append(one["files"])
    found = [f"{', '.join(names)}: {how}" for how, names in mapped.items()]
    for report in (inputs.collect, inputs.tokenize):
        found += (report or {}).get("notes") or []
    if not found:
        return None
    return tag("ul", *(tag("li", note) for note in found), class_="notes")


def checks(inputs: Inputs) -> Section:
    """What validate found: problems first."""
    if inputs.validate is None:
        return Section("checks", "Checks", absent("The checks before training", "validate"))
    found = inputs.validate["checks"]
    loud = [check for check in found if check["level"] != "ok"]
    quiet = [check for check in found if check["level"] == "ok"]
    loud.sort(key=lambda check: check["level"] != "error")
    body: list[Any] = [_check(check) for check in loud]
    if quiet:
        summary = tag("summary", f"{words.plural(len(quiet), 'check')} passed")
        body.append(tag("details", summary, *(_check(check) for check in quiet)))
    lead = "Nothing stands out." if not loud else f"{words.plural(len(loud), 'remark')}."
    return Section("checks", "Checks", join(body), lead)


def _check(check: Mapping[str, Any]) -> Markup:
    level = LEVELS.get(check["level"], "info")
    extra = [
        tag("div", tag("dt", name), tag("dd", check[name]))
        for name in ("found", "expected", "fix")
        if check.get(name) not in (None, "") and level != "ok"
    ]
    return tag(
        "div",
        badge(check["level"], level),
        tag("p", tag("b", check["name"]), " ", check["message"] or _found(check)),
        tag("dl", *extra, class_="facts") if extra else None,
        class_="check",
    )


def _found(check: Mapping[str, Any]) -> str:
    """What a check that passed in silence looked at."""
    parts = [str(check[key]) for key in ("found", "expected") if check.get(key) not in (None, "")]
    return ", ".join(parts)


def _split(report: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    return ((report or {}).get("splits") or {}).get(name) or {}
