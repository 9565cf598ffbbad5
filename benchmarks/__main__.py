"""`python -m benchmarks [FIGURES] [--quick]`: time and memory beside mlx-lm's own loop.

FIGURES: default (when none is named), layers, lengths, long, rows, recompute, kinds, data, or all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import axes, data, figures, turns, workspace
from benchmarks.machine import RESULTS
from stages.core import console, entry
from stages.core.machine import device


def main(argv: Sequence[str]) -> int:
    """Take the figures and write them to benchmarks/results/."""
    known = [*figures.GROUPS, "data"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURES", help=", ".join([*known, "all"]))
    parser.add_argument("--quick", action="store_true", help="the tiny model: does it run?")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each variant")
    parser.add_argument("--variants", help="only these, by their start, separated by semicolons")
    parser.add_argument("--rows", type=int, help="of data; default 100,000")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    given = parser.parse_args(argv)
    names = known if "all" in given.figures else given.figures or ["default"]
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"no such figures: {', '.join(unknown)}; known: {', '.join(known)}, all")
    return entry.guarded("benchmarks", lambda: _take(names, given))


def _take(names: Sequence[str], given: argparse.Namespace) -> int:
    out = given.out or (workspace.WORK / "quick" if given.quick else RESULTS)
    console.say(f"OpenBLAS threads: {device.threads()}; results go to {out}")
    missing = []
    for name in names:
        if name == "data":
            data.take(out, given.rows or (data.QUICK_ROWS if given.quick else data.ROWS))
            continue
        job = _job(given.quick)
        for figure, specs in figures.GROUPS[name](job).items():
            chosen = _chosen(specs, given.variants)
            repeats = 1 if given.quick else given.repeats
            report = turns.take(figure, chosen, repeats, turns.measured_in(job.folder), out)
            missing += [
                f"{figure}, {variant}"
                for variant, x in report["variants"].items()
                if not x["agrees"]
            ]
        if name in axes.AXES:
            axes.write(name, out)
    if missing:
        console.fail(["Some variants have no figure", *missing])
        return entry.FAILED
    return entry.DONE


def _job(quick: bool) -> figures.Job:
    folder = workspace.make("tiny" if quick else "smollm2")
    return figures.quick(folder) if quick else figures.Job(folder)


def _chosen(specs: dict, starts: str | None) -> dict:
    """The variants whose names begin with one of `starts`, and always the first."""
    if starts is None:
        return specs
    wanted = tuple(start.strip() for start in starts.split(";"))
    first = next(iter(specs))
    return {name: x for name, x in specs.items() if name == first or name.startswith(wanted)}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
