"""Our side of a figure: passes through the loop of the train stage, as a run takes them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.spec import Spec
from benchmarks.subject import Subject
from stages.core.activations import identity
from stages.core.config import schema
from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching, schedule
from stages.core.update.step import Step
from stages.train import frozen, loop, optimizer
from stages.train.checkpoint import Store
from stages.train.session import check_batch
from stages.train.state import TrainState
from stages.train.stopping import Stop


def measure(subject: Subject, plan: Plan, spec: Spec) -> dict[str, Any]:
    """Seconds, peaks in MB (1e6 bytes) and loss of `spec.passes` passes.

    The first pass holds what a run does once: the check of the plan and, where the plan keeps them,
    the activations of the frozen layers, which are computed anew.
    """
    whole = mx.get_active_memory()
    forget_activations(subject)
    started = time.perf_counter()
    mx.reset_peak_memory()
    job, state = prepare(subject, plan, spec)
    setup_s = time.perf_counter() - started
    weights = max(whole, subject.manifest.bytes)
    setup_peak, held = mx.get_peak_memory(), min(mx.get_active_memory(), weights)
    seconds = [one_pass(job, state) for _ in range(spec.passes)]
    for store in job.stored.values():
        store.close()
    forget_activations(subject)
    rows = state.history.updates.rows
    losses, targets = (column(state.history.updates, name) for name in ("loss", "targets"))
    peaks = 1e9 * column(state.history.run, "peak_gb")
    first = len(rows) // spec.passes
    return {
        "setup_s": setup_s,
        "first_s": setup_s + seconds[0],
        "later_s": seconds[1:],
        "loss": float((losses * targets)[:first].sum() / targets[:first].sum()),
        "targets": int(targets[:first].sum()),
        "peak_mb": max(setup_peak, peaks.max()) / 1e6,
        "setup_peak_mb": setup_peak / 1e6,
        "later_peak_mb": float(peaks[first:].max(initial=0.0)) / 1e6,
        "weights_mb": weights / 1e6,
        "held_mb": held / 1e6,
        "above_mb": max(setup_peak - weights, peaks.max() - held) / 1e6,
        "plan": job.step.plan.record(),
        "notes": job.step.notes,
        **padding(subject.examples, job),
    }


def prepare(subject: Subject, plan: Plan, spec: Spec) -> tuple[loop.Job, TrainState]:
    """A job of the train stage's loop, made as a session makes it, and its first state."""
    step = Step(subject.model, subject.attached, plan)
    settings, examples = subject.settings, subject.examples
    stored = frozen.stored(
        step,
        {"train": examples},
        check_batch(examples, plan),
        settings=settings,
        manifest=subject.manifest,
        device=subject.device,
        stop=Stop(),
    )
    train = settings.train
    updates = batching.updates_in_run(len(examples), spec.effective, train.epochs, train.updates)
    job = loop.Job(
        train=train,
        run=schema.Run(),
        step=step,
        examples=examples,
        valid=no_examples(),
        rates=schedule.rates(train, updates),
        updates=updates,
        last=updates,
        store=Store(Path("unused"), "unused"),
        stop=Stop(),
        stored=stored,
    )
    return job, TrainState(optimizer.build(train, subject.model))


def one_pass(job: loop.Job, state: TrainState) -> float:
    """Take every update of the next pass; its seconds."""
    started, epoch = time.perf_counter(), state.epoch
    while state.epoch == epoch:
        loop.update(job, state)
    return time.perf_counter() - started


def padding(examples: Examples, job: loop.Job) -> dict[str, Any]:
    """Tokens of a pass with and without padding, and the shapes that micro-batches have."""
    plan = job.step.plan
    micros = [
        micro
        for ids in loop.batches_of(job, 0)
        for micro in batching.micro_batches(examples, ids, plan)
    ]
    return {
        "tokens": sum(micro.tokens for micro in micros),
        "padded_tokens": sum(micro.tokens_BT.size for micro in micros),
        "micro_batches": len(micros),
        "shapes": len({micro.tokens_BT.shape for micro in micros}),
    }


def forget_activations(subject: Subject) -> None:
    """Remove stored activations of these examples, so that the first pass makes them."""
    folder = identity.folder(
        subject.manifest, subject.attached.cut, subject.examples, subject.device.kind
    )
    shutil.rmtree(folder, ignore_errors=True)
    for left in folder.parent.glob(f"{folder.name}.*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def column(rows: Any, name: str) -> np.ndarray:
    """One column of a run's rows, float64."""
    index = rows.columns.index(name)
    return np.array([float(row[index]) for row in rows.rows])


def no_examples() -> Examples:
    """A split without examples."""
    return Examples(
        offsets=np.zeros(1, np.int64),
        tokens=np.zeros(0, np.int32),
        target_mask=np.zeros(0, bool),
        row=np.zeros(0, np.int64),
        piece=np.zeros(0, np.int32),
    )
