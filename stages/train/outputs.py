"""What the stage leaves: adapters/ and reports/train/, and the rows of an update that failed."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.core import console, entry, files
from stages.core.machine.device import Device
from stages.core.model.manifest import Manifest
from stages.core.model.trainable import trained
from stages.core.tables import Examples
from stages.core.update import adapters
from stages.train.loop import Job, NotFiniteError
from stages.train.state import TrainState

ADAPTERS, REPORTS = Path("adapters"), Path("reports/train")
STOPPED = "stopped.json"
MOST_LISTED = 5


def finish(
    job: Job,
    state: TrainState,
    manifest: Manifest,
    device: Device,
    *,
    limits: dict[str, float | None],
    recoveries: Sequence[dict[str, Any]] = (),
) -> None:
    """Write reports/train/ and adapters/, each whole or not at all.

    adapters/ holds the arrays of the best validation, or the last ones where nothing was validated.

    Args:
        limits: Memory limits in effect, in GB, for run.json.
        recoveries: What happened, likewise.
    """
    weights, update, why = chosen(job, state)
    telemetry = {
        "adapters": {"update": update, "why": why},
        "host": platform.node(),
        "device": device.record(),
        "versions": device.versions,
        "plan": {
            **job.step.plan.record(),
            "measured_peak_gb": max(state.peaks.values(), default=None),
        },
        "phase_peaks_gb": state.peaks,
        "switched_off": job.step.notes,
        "activation_cache": {split: store.record() for split, store in job.stored.items()},
        "limits": limits,
        "ranks": job.ranks.size,
        "skipped_updates": state.skipped,
        "resumed_at_updates": state.resumed,
        "recoveries": list(recoveries),
        "updates": state.update,
        "updates_of_whole_run": job.updates,
    }
    entry.sweep("train")
    with files.replacing_folder(REPORTS) as folder:
        state.history.write(folder)
        files.write_json(folder / "run.json", telemetry)
    adapters.save(ADAPTERS, weights, manifest, job.train)
    console.say(f"adapters/ holds update {update}: {why}")


def chosen(job: Job, state: TrainState) -> tuple[dict[str, mx.array], int, str]:
    """The arrays to keep, the update they are of, and why these."""
    if state.best is None:
        return trained(job.step.model), state.update, "the last one, nothing was validated"
    why = f"the best validation loss, {state.best.loss:.4f}"
    return mx.load(str(job.store.best_file(state.best.update))), state.best.update, why


def stopped(job: Job, error: NotFiniteError) -> dict[str, Any]:
    """Write the rows of an update that failed to reports/train/ and beside its checkpoints.

    A temporary workspace is deleted when its stage fails; the second copy outlives it.
    """
    outcome = error.outcome
    report = {
        "update": error.update,
        "what": error.what,
        "loss": _number(outcome.loss),
        "grad_norm": _number(error.norm),
        "examples": [_example(job.examples, i, i in outcome.bad) for i in outcome.ids.tolist()],
    }
    for folder in (REPORTS, job.store.folder) if job.ranks.first else ():
        files.write_json(folder / STOPPED, report)
    return report


def listed(report: dict[str, Any]) -> str:
    """The suspect rows of a `stopped` report, for the message."""
    if not report["examples"]:
        return "all rows of the valid set"
    suspects = [x for x in report["examples"] if x["loss_not_finite"]] or report["examples"]
    shown = ", ".join(f"row {x['row']} (example {x['example']})" for x in suspects[:MOST_LISTED])
    rest = len(suspects) - MOST_LISTED
    return shown + (f" and {rest} more" if rest > 0 else "")


def _example(examples: Examples, i: int, bad: bool) -> dict[str, Any]:
    return {
        "example": i,
        "row": int(examples.row[i]),
        "piece": int(examples.piece[i]),
        "tokens": int(examples.lengths[i]),
        "targets": int(examples.targets[i]),
        "loss_not_finite": bad,
    }


def _number(value: float) -> float | str:
    """JSON has no word for NaN and infinity: they stand as text."""
    return value if math.isfinite(value) else str(value)
