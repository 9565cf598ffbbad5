"""Write the tables of docs/benchmarks.md from benchmarks/results: `python -m benchmarks.page`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a file of results. What is
between other marks, and all prose, is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.machine import REPOSITORY

PAGE = REPOSITORY / "docs" / "benchmarks.md"
RESULTS = REPOSITORY / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Fill in every table of the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """The page with each table made anew from its file."""
    return MARKED.sub(lambda mark: f"{mark[1]}{table(mark[2])}{mark[3]}", text)


def table(name: str) -> str:
    """One file of results as Markdown, and the machine it was taken on."""
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    made = _stages(report) if "stages" in report else _variants(report)
    return f"{made}\n{_taken(report)}\n"


def _variants(report: Mapping[str, Any]) -> str:
    heads = (
        "",
        "later pass",
        "speed",
        "first pass",
        "speed",
        "peak above the weights",
        "of mlx-lm's",
        "padding",
        "loss",
    )
    return _markdown(heads, (_variant(*pair) for pair in report["variants"].items()))


def _variant(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if not found.get("agrees"):
        return (name, "no figure: its losses are not mlx-lm's", *[""] * 7)
    ratio = found["ratios"]
    return (
        name,
        _seconds(found["later_s"]),
        _times(ratio["later"]),
        _seconds(found["first_s"]),
        _times(ratio["first"]),
        f"{found['above_mb']['median'] / 1e3:.2f} GB",
        f"{ratio['above']:.0%}" if ratio["above"] else "",
        f"{found['padding_share']:.0%}",
        f"{found['loss']:.5f}",
    )


def _stages(report: Mapping[str, Any]) -> str:
    rows = [
        (stage, f"{x['seconds']:.1f} s", f"{x['processor_s']:.1f} s", f"{x['peak_mb']:.0f} MB")
        for stage, x in report["stages"].items()
    ]
    together = f"{report['together_s']:.1f} s"
    rows.append(("without model", together, "", f"{report['peak_mb']:.0f} MB"))
    head = _markdown(("stage", "time", "processor", "peak memory"), rows)
    ours, bare = report["tokenize_rows_per_s"], report["bare_loop_rows_per_s"]
    return (
        f"{head}\n{report['rows']:,} rows. tokenize takes {ours:,.0f} rows a second, a bare"
        f" `encode_batch` loop over the same texts {bare:,.0f}: {ours / bare:.2f} of it.\n"
    )


def _taken(report: Mapping[str, Any]) -> str:
    machine, devices = report["machine"], {}
    for found in report.get("variants", {}).values():
        if "device" in found:
            devices[found["device"]["name"]] = found["device"]["kind"]
    device = ", ".join(f"{name} ({kind})" for name, kind in devices.items())
    where = device or machine["processor"]
    repeats = f", {report['repeats']} turn(s)" if "repeats" in report else ""
    return (
        f"Taken {machine['time']} on {where}, {machine['cores']} cores, mlx"
        f" {machine['versions']['mlx']}, mlx-lm {machine['versions']['mlx-lm']}{repeats}; load"
        f" before it {machine['load']}. `benchmarks/results/` holds each run.\n"
    )


def _markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seconds(found: Mapping[str, float] | None) -> str:
    return f"{found['median']:.2f} s" if found else ""


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else ""


if __name__ == "__main__":
    sys.exit(main())
