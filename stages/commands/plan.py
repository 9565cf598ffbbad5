"""Predict a run's memory and time on this machine, and choose the fastest plan that fits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from stages.core import console, entry, paths, tables
from stages.core.config.settings import load_settings
from stages.core.machine import device
from stages.core.memory import chart, table
from stages.core.memory.choose import Choice, choose
from stages.core.model.manifest import read_manifest

EXAMPLES = Path("data/examples")


def main(argv: Sequence[str]) -> int:
    """Print the plan; 2 where nothing fits."""
    parser = argparse.ArgumentParser(prog="python -m stages plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the plan as JSON on stdout")
    parser.add_argument("overrides", nargs="*", metavar="memory.key=value")
    given = parser.parse_args(argv)
    return entry.guarded("plan", lambda: _plan(given.overrides, given.json))


def _plan(overrides: Sequence[str], as_json: bool) -> None:
    settings = load_settings(overrides=overrides)
    manifest = read_manifest()
    splits = [tables.read_examples(EXAMPLES / f"{name}.parquet") for name in ("train", "valid")]
    chosen = device.prepare(settings.run.device)
    console.say(chosen.line())
    choice = choose(
        settings,
        manifest,
        *splits,
        device=chosen,
        whole_table=True,
        note=lambda line: console.say(f"measure {line}"),
    )
    picture = paths.cache("plans") / "peak.svg"
    if choice.chosen is not None:
        chart.draw(choice, picture)
    if as_json:
        print(json.dumps(table.record(choice), indent=2))
    else:
        show(choice, picture)


def show(choice: Choice, picture: Path) -> None:
    """The choice for a person."""
    if choice.chosen is not None:
        console.table(
            "What each setting saves and costs alone, beside the loss in pieces",
            ("setting", "peak GB", "saves GB", "s an update", "costs s"),
            [
                (
                    ("→ " if row.chosen else "  ") + row.name,
                    f"{row.peak_gb:.3f}",
                    f"{row.saves_gb:+.3f}",
                    f"{row.seconds:.2f}",
                    f"{row.costs_seconds:+.2f}",
                )
                for row in table.rows(choice)
            ],
        )
        for name, text in table.facts(choice).items():
            console.say(f"{name + ':':<30} {text}")
        console.say(f"chart: {picture}")
    for note in choice.notes:
        console.warn(note)
    console.say(choice.line())
    console.say(f"{choice.points} points measured, {choice.seconds:.1f} s")
