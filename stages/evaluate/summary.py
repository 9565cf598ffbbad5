"""What the console says at the end: the table, the samples, where to look next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.core import console
from stages.evaluate.records import shortened

LONGEST_PROMPT = 160
LONGEST_SHOWN = 360
FEWEST_ROWS = 10
"""Below it a bootstrap over rows is rough, and said to be."""
MOST_SAMPLES = 3


def show(split: str, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    """Print base against tuned on all targets, at most three samples, and the next steps."""
    title = f"{split}: {metrics['rows']:,} rows, {metrics['targets']:,} targets"
    console.table(title, ["", "loss (nats)", "perplexity", "token accuracy"], table_rows(metrics))
    console.say(verdict(metrics))
    for note in notes(split, metrics):
        console.say(note)
    for sample in samples[:MOST_SAMPLES]:
        where = f"row {sample['row']} ({sample['source']}:{sample['line']})"
        console.side_by_side(f"{where}: {asked(sample)}", sample_columns(sample))
    console.say("next: reports/report.html (the whole run on one page), `make chat` (try it)")


def table_rows(metrics: Mapping[str, Any]) -> list[list[str]]:
    """Base, tuned and change as rows of the table."""
    base, tuned = metrics["base"], metrics["tuned"]
    rows = [
        [name, f"{m['loss']:.4f}", f"{m['perplexity']:.3f}", f"{m['token_accuracy']:.1%}"]
        for name, m in (("base", base), ("tuned", tuned))
    ]
    ratio = tuned["perplexity"] / base["perplexity"] - 1
    points = 100 * (tuned["token_accuracy"] - base["token_accuracy"])
    change = [f"{metrics['loss_change']:+.4f}", f"{ratio:+.1%}", f"{points:+.1f} points"]
    return [*rows, ["change", *change]]


def verdict(metrics: Mapping[str, Any]) -> str:
    """The change with its interval, in one line."""
    low, high = metrics["loss_change_low"], metrics["loss_change_high"]
    interval = f"95% interval {low:+.4f} to {high:+.4f} (bootstrap over rows)"
    word = "better" if high < 0 else "worse" if low > 0 else "no clear change"
    improved = f"{metrics['improved_share']:.0%} of the rows improved"
    return f"loss change {metrics['loss_change']:+.4f}, {interval}: {word}; {improved}"


def notes(split: str, metrics: Mapping[str, Any]) -> list[str]:
    """What a reader of the table should know."""
    found = []
    leaked = metrics["also_in_train"]["rows"]
    if leaked:
        rest = metrics.get("not_in_train")
        without = "all of them" if rest is None else f"without them: {_change(rest):+.4f}"
        found.append(f"{leaked} {split} rows also stand in train ({without})")
    if metrics["rows"] < FEWEST_ROWS:
        found.append(f"few rows ({metrics['rows']}): the interval is rough")
    return found


def asked(sample: Mapping[str, Any]) -> str:
    """The last turn before the answer on one line, shortened."""
    prompt = sample["turns"][-1]["content"] if sample["turns"] else sample["prompt"]
    return shortened(" ".join(prompt.split()), LONGEST_PROMPT)


def sample_columns(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Reference, base and tuned of one sample, each shortened, as (heading, text)."""
    columns = [("in the data", sample["reference"])]
    columns += [(name, sample[name]["text"]) for name in ("base", "tuned")]
    return [(name, shortened(text.strip(), LONGEST_SHOWN)) for name, text in columns]


def _change(totals: Mapping[str, Any]) -> float:
    return totals["tuned"]["loss"] - totals["base"]["loss"]
