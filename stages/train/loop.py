"""The exact update, in small pieces: order, cut, micro-steps, update, validation, record.

    loss of a micro-batch = sum over its targets / targets of the whole update

so gradients of micro-batches add up to the gradient of the effective batch, however it is cut.
Nothing here reads settings files, the environment or the clock to decide anything.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stages.core import console
from stages.core.activations.reader import Activations
from stages.core.config import schema
from stages.core.machine.measure import memory_now, phase
from stages.core.tables import Examples
from stages.core.update import batching, noise
from stages.core.update.schedule import Rates
from stages.core.update.step import Step, zero_gradient
from stages.train import optimizer
from stages.train.checkpoint import Store
from stages.train.ranks.alone import ALONE, Alone
from stages.train.recovery.guard import Unguarded
from stages.train.state import Best, Outcome, TrainState
from stages.train.stopping import Stop
from stages.train.tracking import Tracker

MOST_SKIPPED = 10

epoch_batches = functools.lru_cache(maxsize=2)(batching.effective_batches)


@dataclass(frozen=True)
class Job:
    """What stays the same during a run.

    Attributes:
        train: The mathematics.
        run: How often to save, how many checkpoints to keep.
        step: Loss and gradient under the plan.
        examples, valid: What is trained, and what is validated (may be empty).
        rates: The learning rate of every update.
        updates: Updates of the whole run.
        last: The update to end at: `updates`, or `train.stop_at_update` before that.
        store: The run's checkpoints.
        stop: Looked at between micro-batches.
        stored: What the frozen layers give, by split; {} where they run.
        tracker: Told of every row.
        guard: Around every step: marks it, and does it again after out of memory.
        ranks: The processes that share every update and every validation.
    """

    train: schema.Train
    run: schema.Run
    step: Step
    examples: Examples
    valid: Examples
    rates: Rates
    updates: int
    last: int
    store: Store
    stop: Stop
    stored: Mapping[str, Activations] = field(default_factory=dict)
    tracker: Tracker = field(default_factory=Tracker)
    guard: Unguarded = field(default_factory=Unguarded)
    ranks: Alone = field(default_factory=Alone)


class NotFiniteError(Exception):
    """A loss, gradient or weight is NaN or infinite, and the run may not go on."""

    def __init__(self, update: int, what: str, outcome: Outcome, norm: float) -> None:
        super().__init__(f"update {update}: {what}")
        self.update = update
        self.what = what
        self.outcome = outcome
        self.norm = norm


def train(job: Job, state: TrainState) -> None:
    """Go on from `state` until the job is done; `state` is between two updates at every exit.

    Raises:
        Stopped: A signal arrived.
        NotFiniteError: See `train.on_nonfinite`.
    """
    with console.progress("train", job.last, "updates") as advance:
        advance(state.update)
        while True:
            if validation_due(job, state):
                validate(job, state)
            if save_due(job, state):
                job.ranks.keep_equal(job.step.model, state.optimizer)
                job.store.save(state, job.step, job.run.keep_last)
            if done(job, state):
                return
            loss = update(job, state)
            advance(1, note=f"loss {loss:.4f}" if math.isfinite(loss) else "skipped")


def done(job: Job, state: TrainState) -> bool:
    """Whether the last update is reached or patience has run out."""
    return state.update >= job.last or out_of_patience(job, state)


def out_of_patience(job: Job, state: TrainState) -> bool:
    """Whether `train.patience` validations in a row were no better than the best one."""
    return job.train.patience is not None and state.stale >= job.train.patience


def validation_due(job: Job, state: TrainState) -> bool:
    """Whether this update is validated: every `updates_per_eval`, and the end of the whole run.

    Never because of `stop_at_update`: a run that goes on later has the same rows as one that never
    stopped.
    """
    if not len(job.valid) or state.update in (0, state.evaluated):
        return False
    every = job.train.updates_per_eval
    return state.update == job.updates or (every is not None and state.update % every == 0)


def save_due(job: Job, state: TrainState) -> bool:
    """Whether a checkpoint is written now: every `updates_per_save` and at the end."""
    if state.update == 0 or job.store.holds(state):
        return False
    return state.update % job.run.updates_per_save == 0 or done(job, state)


def update(job: Job, state: TrainState) -> float:
    """Take one update and record it; returns its loss per target."""
    started = time.monotonic()
    peaks: dict[str, float] = {}
    batches = batches_of(job, state.epoch)
    ahead = batches_of(job, state.epoch + 1)[:1] if job.stored else []
    following = [*batches[state.position + 1 :], *ahead][:1]
    number, ids = state.update + 1, batches[state.position]
    with phase(peaks, "micro_step"):
        outcome = job.guard.update(number, ids, lambda: micro_steps(job, number, ids, following))
    rate = job.rates(state.update)
    with phase(peaks, "update"):
        norm = take(job, state, outcome, rate)
    state.advance(len(batches))
    record(job, state, outcome, rate, norm)
    record_machine(state, outcome, peaks, time.monotonic() - started)
    return outcome.loss


def batches_of(job: Job, epoch: int) -> list[np.ndarray]:
    """The example ids of each update of an epoch."""
    train = job.train
    return epoch_batches(len(job.examples), train.effective_batch_size, train.seed, epoch)


def micro_steps(
    job: Job, number: int, ids: np.ndarray, following: Sequence[np.ndarray] = ()
) -> Outcome:
    """Cut the examples of update `number` under the plan and add up loss and gradient.

    Every rank computes its own micro-batches and gets the sum of all.

    Args:
        following: Examples of the updates after it, whose activations are read ahead.
    """
    mine = job.ranks.micros(job.examples, ids, job.step.plan)
    store = job.stored.get("train")
    if store is not None:
        later = [job.ranks.micros(job.examples, x, job.step.plan) for x in following]
        store.expect([micro for _, micro in sum(later, mine) if micro.targets])
    targets = int(job.examples.targets[ids].sum())
    loss, gradient, bad = 0.0, None, []
    for index, micro in mine:
        if job.ranks.asked(job.stop):
            break
        if not micro.targets:
            continue
        noise.seed(job.train.seed, number, index)
        boundary = None if store is None else store.boundary(micro)
        part, gradient = job.step.gradient(micro, targets, gradient, boundary)
        loss += part
        if not math.isfinite(part):
            bad += micro.ids.tolist()
    losses = job.ranks.together(job.stop, loss, *np.isin(ids, bad))
    gradient = job.ranks.sum(zero_gradient(job.step.model) if gradient is None else gradient)
    return Outcome(
        loss=float(losses[:, 0].sum()),
        gradient=gradient,
        ids=ids,
        targets=targets,
        tokens=int(job.examples.lengths[ids].sum()),
        bad=tuple(ids[losses[:, 1:].any(axis=0)].tolist()),
    )


def take(job: Job, state: TrainState, outcome: Outcome, rate: float) -> float | None:
    """Clip and apply the gradient, or skip the update; returns the norm before clipping.

    Raises:
        NotFiniteError: Loss or gradient are not finite, and are not to be skipped (any more), or
            the weights would not be after the step.
    """
    gradient, norm = optimizer.clipped(outcome.gradient, job.train.clip_norm)
    number = state.update + 1
    if not (math.isfinite(outcome.loss) and math.isfinite(norm)):
        what = f"loss {outcome.loss}, gradient norm {norm}"
        if job.train.on_nonfinite == "stop":
            raise NotFiniteError(number, what, outcome, norm)
        if state.skipped == MOST_SKIPPED:
            what += f", after {MOST_SKIPPED} skipped updates"
            raise NotFiniteError(number, what, outcome, norm)
        state.skipped += 1
        console.warn(f"update {number} is skipped ({state.skipped} so far): {what}")
        return None
    if not optimizer.apply(job.step.model, state.optimizer, gradient, rate):
        raise NotFiniteError(number, "the weights after it are not finite", outcome, norm)
    return norm


def validate(job: Job, state: TrainState) -> None:
    """Validate, keep the arrays if they are the best so far, and record it.

    Raises:
        NotFiniteError: The loss is not finite, so the weights are of no use any more.
    """
    peaks: dict[str, float] = {}
    with phase(peaks, "validation"):
        stored = job.stored.get("valid")
        loss = job.guard.validation(
            state.update,
            lambda: evaluate(job.step, job.valid, job.stop, stored, job.ranks),
        )
    if not math.isfinite(loss):
        none = Outcome(loss, {}, np.zeros(0, np.int64), targets=0, tokens=0, bad=())
        raise NotFiniteError(state.update, f"validation loss {loss}", none, math.nan)
    state.note_peaks(peaks)
    better = state.best is None or loss < state.best.loss
    if better:
        state.best = Best(state.update, loss)
        job.store.keep_best(state, job.step.model)
    state.stale = 0 if better else state.stale + 1
    state.evaluated = state.update
    epoch = passes(job, state)
    targets = int(job.valid.targets.sum())
    state.history.valid.add(
        update=state.update, epoch=epoch, loss=loss, targets=targets, best=better
    )
    job.tracker.valid(state.history.valid)
    console.say(f"update {state.update}: validation loss {loss:.4f}{' (best)' if better else ''}")


def evaluate(
    step: Step,
    examples: Examples,
    stop: Stop,
    store: Activations | None = None,
    ranks: Alone = ALONE,
) -> float:
    """Loss per target over all examples; draws no random number, so training stays as it is.

    Args:
        stop: Looked at before each micro-batch.
        store: What the frozen layers give for these examples; None where they run.
        ranks: Who share them.
    """
    mine = ranks.micros(examples, np.arange(len(examples)), step.plan)
    micros = [micro for _, micro in mine if micro.targets]
    if store is not None:
        store.expect(micros)
    total = 0.0
    for micro in micros:
        if ranks.asked(stop):
            break
        boundary = None if store is None else store.boundary(micro)
        total += float(step.target_losses(micro, boundary).loss.sum(dtype=np.float64))
    losses = ranks.together(stop, total)
    return float(losses.sum()) / max(1, int(examples.targets.sum()))


def passes(job: Job, state: TrainState) -> float:
    """Passes over the examples done so far."""
    inside = state.position * job.train.effective_batch_size
    return state.epoch + inside / len(job.examples)


def record(job: Job, state: TrainState, outcome: Outcome, rate: float, norm: float | None) -> None:
    """Add the update's row to history.csv; a skipped one has neither loss nor norm."""
    state.history.updates.add(
        update=state.update,
        epoch=passes(job, state),
        loss=None if norm is None else outcome.loss,
        targets=outcome.targets,
        tokens=outcome.tokens,
        learning_rate=float(f"{rate:.7g}"),
        grad_norm=norm,
    )
    job.tracker.update(state.history.updates)


def record_machine(
    state: TrainState, outcome: Outcome, peaks: dict[str, float], seconds: float
) -> None:
    """Add the update's row to run.csv."""
    state.note_peaks(peaks)
    state.history.run.add(
        update=state.update,
        seconds=seconds,
        tokens_per_second=outcome.tokens / seconds,
        peak_gb=max(peaks.values()),
        **memory_now(),
    )
