"""Whole runs of a few updates: under two cuts, and stopped and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map

from stages.commands.proving.finding import Finding, distance
from stages.commands.proving.gradients import WIDER, tolerance
from stages.commands.proving.trial import Trial, checked_step, without_dropout
from stages.core import files
from stages.core.config import schema
from stages.core.memory.plan import Plan
from stages.core.model.trainable import trained
from stages.train import loop
from stages.train.checkpoint import MOMENTS, WEIGHTS

UPDATES = 5
CHANGE_TOLERANCE = 1e-4
"""Of the weights' change, in float32."""
EPSILONS = 8.0
"""In other types: Adam divides by the gradient's own size, so rounding moves small ones a lot."""
HALF, WHOLE = 2, 4
"""Updates before the stop, and in all."""
SAME_FILES = (WEIGHTS, MOMENTS, "history.csv", "valid.csv")
COSINE = schema.Schedule(name="cosine", warmup=1)


def updates(trial: Trial, folder: Path) -> Iterator[Finding]:
    """Some updates with each effective batch whole, and in small micro-batches.

    In types other than float32 also whole with another padding, whose distance sets the tolerance.
    """
    small = max(1, trial.rows // 4)
    width = max(trial.widths)
    with without_dropout(trial.model):
        whole = _train(trial, folder, trial.plan(trial.rows, widths=(width,)))
        noise = 0.0
        if not trial.float32:
            wider = _train(trial, folder, trial.plan(trial.rows, widths=(width + WIDER,)))
            noise = distance(wider, whole, trial.start)
        cut = _train(trial, folder, trial.plan(small))
    limit = tolerance(trial, noise, CHANGE_TOLERANCE, EPSILONS)
    if not trial.float32:
        what = f"change of the weights after {UPDATES} updates: two paddings of whole batches"
        yield Finding("updates", what, noise, limit)
    what = f"change of the weights after {UPDATES} updates: micro-batches of {small} against whole"
    yield Finding("updates", what, distance(cut, whole, trial.start), limit)


def resume(trial: Trial, folder: Path) -> Iterator[Finding]:
    """A run, and the same one stopped in the middle and gone on from its checkpoint, bit for bit.

    Dropout, validation and a schedule are part of it. Between the two parts everything that the
    checkpoint has to bring back is spoilt.
    """
    given = {"updates": WHOLE, "schedule": COSINE, "updates_per_eval": HALF}
    plan = trial.plan(max(1, trial.rows // 2))
    straight = _run(trial, folder / "straight", plan, **given)
    _run(trial, folder / "stopped", plan, stop_at_update=HALF, **given)
    trial.model.update(tree_map(lambda x: 1.5 * x + 0.1, trial.model.trainable_parameters()))
    mx.random.seed(WHOLE)
    resumed = _run(trial, folder / "stopped", plan, resume=True, **given)
    first, second = (
        {name: files.sha256_file(at / name) for name in SAME_FILES} for at in (straight, resumed)
    )
    other = [name for name in SAME_FILES if first[name] != second[name]]
    weights = [mx.load(str(at / WEIGHTS)) for at in (resumed, straight)]
    trial.back_to_start()
    yield Finding(
        "resume",
        f"{WHOLE} updates, and {HALF} + {WHOLE - HALF} with a stop: weights, optimizer, history",
        measured=max(distance(*weights, trial.start), float(bool(other))),
        tolerance=0.0,
        note=f"not the same bytes: {', '.join(other)}" if other else "the same bytes",
    )


def _train(trial: Trial, folder: Path, plan: Plan) -> dict[str, mx.array]:
    """The trained arrays after some updates from the start; the model is back there afterwards."""
    trial.back_to_start()
    with checked_step(trial, plan) as step:
        loop.train(trial.job(step, folder / "unsaved", UPDATES), trial.state())
    arrays = trained(trial.model)
    trial.back_to_start()
    return arrays


def _run(trial: Trial, folder: Path, plan: Plan, resume: bool = False, **train: object) -> Path:
    """Train, from the start or from the folder's checkpoint; the folder of the last checkpoint."""
    if not resume:
        trial.back_to_start()
    with checked_step(trial, plan) as step:
        job, state = trial.job(step, folder, **train), trial.state()
        if resume:
            job.store.load(job.store.latest(job.last), state, trial.model)
        loop.train(job, state)
        return job.store.folder / f"{state.update:08d}"
