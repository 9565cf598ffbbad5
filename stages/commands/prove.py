"""Prove on your own model, settings and examples that every cut takes the same step.

python -m stages prove              a table, reports/prove.json, exit 1 when a tolerance is missed
python -m stages prove --json       the same as JSON on stdout
python -m stages prove memory.loss_chunk=64 memory.batch_size=2    with these memory settings

A few examples of data/examples/train.parquet, cut to a bound, make one effective batch whose
gradient is compared: whole and in every cut into micro-batches, padded otherwise, compiled, by
mlx-lm's own loss, under each memory setting. Then a few updates are taken under two cuts, and a run
is stopped and resumed. Nothing of the run itself is touched.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core import console, entry, files, paths
from stages.core.config.settings import Settings, load_settings
from stages.core.machine import device

if TYPE_CHECKING:
    from stages.commands.proving.finding import Finding
    from stages.commands.proving.trial import Trial

REPORT = Path("reports/prove.json")
COLUMNS = ("what", "measured", "loss", "at most", "")
PARTS = {
    "cuts": "gradient of one effective batch, against the plain whole batch",
    "memory": "the same under each memory setting",
    "updates": "a few updates under two cuts",
    "resume": "stopped and resumed",
}


def main(argv: Sequence[str]) -> int:
    """Measure, print, write the report; 1 where a tolerance is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m stages prove",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    parser.add_argument("overrides", nargs="*", metavar="memory.…=…", help="or run.…=…")
    given = parser.parse_args(argv)
    return entry.guarded("prove", lambda: _prove(load_settings(overrides=given.overrides), given))


def _prove(settings: Settings, given: argparse.Namespace) -> int:
    started = time.monotonic()
    chosen = device.prepare(settings.run.device)
    console.say(chosen.line())
    from stages.commands.proving import trial

    subject = trial.load(settings, chosen)
    report = prove(subject)
    report["seconds"] = round(time.monotonic() - started, 1)
    files.write_json(REPORT, report)
    if given.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    missed = [x["what"] for x in report["results"] if x["passed"] is False]
    if missed:
        console.fail([f"{len(missed)} of {len(report['results'])} comparisons missed", *missed])
        return entry.FAILED
    console.say(f"the same step in every way; {REPORT}, {report['seconds']:.0f} s")
    return entry.DONE


def prove(trial: Trial) -> dict[str, Any]:
    """Make all comparisons, print each part as a table, and give the report."""
    from stages.commands.proving import gradients, runs

    console.say(trial.attached.line())
    console.say(
        f"an effective batch of {trial.rows} examples: {gradients.lengths_of(trial)} tokens"
    )
    found: list[Finding] = []
    with gradients.compared(trial) as against:
        if not trial.float32:
            console.say(f"two paddings of the whole batch are {against.paddings:.1e} apart")
        found += _told("cuts", gradients.cuts(trial, against))
        found += _told("memory", gradients.memory(trial, against))
    paths.cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-prove-", dir=paths.cache()) as folder:
        found += _told("updates", runs.updates(trial, Path(folder)))
        found += _told("resume", runs.resume(trial, Path(folder)))
    console.table("The same step?", COLUMNS, [finding.row() for finding in found])
    return {
        "ok": all(finding.passed is not False for finding in found),
        "results": [finding.record() for finding in found],
        "paddings": against.paddings,
        "float32": trial.float32,
        "examples": {
            "effective_batch_size": trial.rows,
            "rows": trial.examples.row.tolist(),
            "lengths": trial.examples.lengths.tolist(),
        },
        "model": {"name": trial.manifest.name, "dtype": trial.manifest.dtype},
        "fine_tune_type": trial.settings.train.fine_tune_type,
        "num_layers": trial.settings.train.num_layers,
        "learning_rate": trial.rate,
        "dropout_off": gradients.dropout_of(trial.model),
        "device": trial.device.record(),
    }


def _told(part: str, findings: Iterator[Finding]) -> list[Finding]:
    """All findings of a part, each told when it is made."""
    console.say(PARTS[part])
    made = []
    for finding in findings:
        made.append(finding)
        console.say(f"  {finding.line()}")
    return made
