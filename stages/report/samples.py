"""Samples: what both models say, and what of a row is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stages.report import words
from stages.report.html import Markup, join, table, tag
from stages.report.inputs import Inputs
from stages.report.section import Section, absent, badge, heading

MOST_SHOWN = 20
SCORES = {
    "exact_match": "exact match",
    "normalised_match": "normalised match",
    "json_valid": "valid JSON (where JSON is expected)",
    "json_equal": "equal JSON (where JSON is expected)",
}
OPEN, CLOSE = "⟦", "⟧"
"""Around targets in the decoded samples of reports/tokenize.json."""


def section(inputs: Inputs) -> Section:
    """Base and tuned answers to the same prompts."""
    if inputs.samples is None:
        return Section("samples", "Samples", absent("Generated answers", "evaluate"))
    entries = inputs.samples["samples"]
    if not entries:
        note = tag("p", "None were asked for (evaluate.samples=0).", class_="absent")
        return Section("samples", "Samples", note)
    lead = (
        "Greedy answers to prompts that a fixed seed chose, cut at"
        f" {inputs.settings.evaluate.max_new_tokens} new tokens."
    )
    body = [scores(inputs.metrics or {}), *(_sample(entry) for entry in entries[:MOST_SHOWN])]
    rest = len(entries) - MOST_SHOWN
    if rest > 0:
        body.append(
            tag("p", f"{words.count(rest)} more in reports/evaluate/samples.json.", class_="note")
        )
    return Section("samples", "Samples", join(body), lead)


def scores(metrics: Mapping[str, Any]) -> Markup | None:
    """Which share of the answers is that of the data."""
    found = metrics.get("answers") or {}
    if not found.get("rows"):
        return None
    rows = [
        [label, words.percent(found["base"].get(key)), words.percent(found["tuned"].get(key))]
        for key, label in SCORES.items()
        if key in found["base"]
    ]
    title = f"{words.plural(found['rows'], 'answer')} scored"
    note = "evaluate.samples says how many rows are asked."
    body = table([title, "base", "tuned"], rows, class_="short")
    return join([body, tag("p", note, class_="note")])


def trained_tokens(inputs: Inputs) -> Markup | None:
    """One decoded row of each form with its targets marked, out of reports/tokenize.json."""
    found = sorted(((inputs.tokenize or {}).get("samples") or {}).items())
    if not found:
        return None
    explained = tag("p", "Marked tokens are targets: their loss is trained.", class_="note")
    return join([heading("What is trained"), explained, *(_marked_row(*one) for one in found)])


def marked(text: str) -> Markup:
    """Text with every part between `OPEN` and `CLOSE` in a mark element."""
    parts = re.split(f"{OPEN}(.*?){CLOSE}", text, flags=re.DOTALL)
    return join(tag("mark", part) if i % 2 else part for i, part in enumerate(parts))


def _sample(entry: Mapping[str, Any]) -> Markup:
    title = f"Row {entry['row']} · {entry['source']}:{entry['line']}"
    prompt = _turns(entry) if entry["turns"] else _quote("prompt", entry["prompt"])
    both = [_answer(name, entry[name]) for name in ("base", "tuned")]
    given = [tag("div", prompt), _quote("in the data", entry["reference"], "reference")]
    return tag(
        "article",
        tag("h3", title),
        tag("div", *given, class_="grid2"),
        tag("div", *both, class_="grid2"),
    )


def worded(text: str) -> Markup:
    """Text as it is, what stands between lines of ``` in the type of code."""
    parts = re.split(r"(^```[^\n`]*\n.*?(?:^```[ \t]*$|\Z))", text, flags=re.DOTALL | re.MULTILINE)
    return join(tag("span", part, class_="mono") if i % 2 else part for i, part in enumerate(parts))


def _turns(entry: Mapping[str, Any]) -> Markup:
    return join(_quote(turn["role"], turn["content"]) for turn in entry["turns"])


def _answer(name: str, answer: Mapping[str, Any]) -> Markup:
    score = answer.get("score") or {}
    badges = [
        badge(words.plural(answer["tokens"], "token")),
        badge("ended" if answer["ended"] else "cut"),
    ]
    if score.get("exact"):
        badges.append(badge("exact match", "ok"))
    elif score.get("normalised"):
        badges.append(badge("normalised match", "ok"))
    if score.get("json_expected"):
        valid, equal = score["json_valid"], score["json_equal"]
        text = "equal JSON" if equal else "valid JSON" if valid else "no JSON"
        badges.append(badge(text, "ok" if equal else "info" if valid else "warning"))
    footer = tag("div", *badges, class_="badges")
    return tag("div", _quote(name, answer["text"]), footer, class_=f"answer {name}")


def _quote(name: str, text: str, class_: str = "") -> Markup:
    shown = worded(text) if text.strip() else tag("i", "nothing")
    said = tag("div", shown, class_="words", dir="auto")
    return tag("div", tag("div", name, class_="who"), said, class_=f"quote {class_}".strip())


def _marked_row(form: str, sample: Mapping[str, Any]) -> Markup:
    where = f"{form} · {sample['source']}:{sample['line']}"
    cut = " …" if sample["cut"] else None
    body = tag("div", marked(sample["text"]), cut, class_="words mono", dir="auto")
    return tag("div", tag("div", where, class_="who"), body, class_="quote")
