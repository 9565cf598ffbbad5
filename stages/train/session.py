"""One run in this process: loaded, resumed where it stopped, trained, its outputs written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from stages.core import console, files
from stages.core.activations.reader import Activations
from stages.core.config.settings import Settings
from stages.core.entry import Stopped
from stages.core.errors import RunFailed, UserError
from stages.core.machine.device import Device
from stages.core.memory.plan import Plan
from stages.core.model import models
from stages.core.model.manifest import read_manifest
from stages.core.model.trainable import attach
from stages.core.tables import Examples, read_examples
from stages.core.update import adapters, batching, schedule
from stages.core.update.step import Step
from stages.train import frozen, loop, optimizer, outputs, planning, tracking
from stages.train.checkpoint import bytes_on_disk
from stages.train.identity import TRAIN, VALID
from stages.train.ranks.alone import ALONE, Alone
from stages.train.recovery.guard import Guard
from stages.train.recovery.ledger import HandOver, Ledger
from stages.train.state import TrainState
from stages.train.stopping import Stop


class Session:
    """Everything of one run.

    Args:
        settings: Of this run.
        device: What computes.
        folder: Of the run's checkpoints; its name is the run's fingerprint.
        stop: Looked at between micro-batches.
        ranks: The processes of this run; the first one alone writes.

    Raises:
        UserError: A file is missing or does not fit, or the disk has no room for checkpoints.
    """

    def __init__(
        self, settings: Settings, device: Device, folder: Path, stop: Stop, ranks: Alone = ALONE
    ) -> None:
        tracking.require(settings.run.report_to)
        self.settings = settings
        self.device = device
        self.manifest = read_manifest()
        store = ranks.store(folder, machine_facts(settings, device))
        examples, valid = read_examples(TRAIN), read_examples(VALID)
        updates = updates_of(settings, len(examples))
        last = min(updates, settings.train.stop_at_update or updates)
        saved = store.latest(last)
        ledger = Ledger(store.folder)
        job = planning.Planned(settings, self.manifest, examples, valid, device)
        recovered = ledger.plan_for(store.machine)
        plan = ranks.agreed(lambda: planning.plan(job, store.machine, saved, recovered))
        ledger.begin(plan, plan, store.machine)
        self.limits = set_limits(plan, settings.memory.wired_limit_gb, device)
        step, stored = self._step(plan, examples, valid, stop)
        ledger.begin(plan, step.plan, store.machine)
        self.guard = Guard(step, examples, valid, ledger, self._check, alone=ranks.size == 1)
        if settings.run.step_timeout_s is not None:
            stop.beat = self.guard.marker.beat
        self.state = TrainState(optimizer.build(settings.train, step.model))
        self.job = loop.Job(
            train=settings.train,
            run=settings.run,
            step=step,
            examples=examples,
            valid=valid,
            rates=schedule.rates(settings.train, updates),
            updates=updates,
            last=last,
            store=store,
            stop=stop,
            stored=stored,
            guard=self.guard,
            ranks=ranks,
        )
        if saved is not None:
            store.load(saved, self.state, step.model)
            self.state.resumed.append(self.state.update)
        ranks.start_equal(self.state, step.model, store)
        if ranks.first:
            require_room(self.job, self.state)

    def announce(self) -> None:
        """Say what will be trained, at which rates, and from where."""
        train, job = self.settings.train, self.job
        console.say(job.step.attached.line())
        console.say(schedule.line(train, job.updates))
        if optimizer.ignores_rate(train):
            console.warn(
                "adafactor sets its own rate; optimizer_config relative_step=false uses it"
            )
        for note in job.step.notes:
            console.warn(note)
        if not len(job.valid):
            console.warn("no valid examples: the last adapter is kept, and patience never ends")
        end = f", ends at {job.last}" if job.last < job.updates else ""
        console.say(f"{len(job.examples)} examples, {job.updates} updates{end}")
        if self.state.update:
            console.say(f"goes on after update {self.state.update}, from its checkpoint")

    def train(self) -> None:
        """Train to the last update.

        Raises:
            Stopped: A signal arrived; a checkpoint is written.
            RunFailed: A loss, gradient or weight was not finite; the last good state is kept.
            HandOver: Out of memory where only a fresh process can go on; a checkpoint is written.
        """
        ranks = self.job.ranks
        if ranks.first:
            self.job.tracker.start(self.settings, self.job.store.fingerprint, self.state.history)
        try:
            loop.train(self.job, self.state)
        except loop.NotFiniteError as error:
            failed = self._failed(error)
            ranks.barrier()
            raise failed from error
        except (Stopped, SystemExit, BrokenPipeError, HandOver) as error:
            self._save()
            if isinstance(error, Stopped):  # all ranks were; the first one has its checkpoint now
                ranks.barrier()
            raise

    def finish(self) -> None:
        """Write adapters/ and reports/train/; a run that is through needs no checkpoints any more.

        A run ended by stop_at_update keeps them, without the validation made here for its adapter,
        so that going on later equals a run that never stopped.
        """
        job, state = self.job, self.state
        if len(job.valid) and state.evaluated != state.update:
            loop.validate(job, state)
        job.ranks.keep_equal(job.step.model, state.optimizer)
        if job.ranks.size > 1:
            state.note_peaks({"any_rank": job.ranks.most(max(state.peaks.values(), default=0.0))})
        if job.ranks.first:
            machine = {"limits": self.limits, "recoveries": self.guard.ledger.events}
            outputs.finish(job, state, self.manifest, self.device, **machine)
        if state.update == job.updates or loop.out_of_patience(job, state):
            job.store.clear()
            self.guard.ledger.clear()

    def _save(self) -> None:
        """A checkpoint of the state as it is, unless that is on the disk already."""
        job, state = self.job, self.state
        if state.update and not job.store.holds(state):
            job.store.save(state, job.step, job.run.keep_last)

    def _failed(self, error: loop.NotFiniteError) -> RunFailed:
        weights_good = error.outcome.targets > 0  # else validation, not an update, went wrong
        if weights_good and optimizer.finite(self.job.step.model.trainable_parameters()):
            self._save()
        report = outputs.stopped(self.job, error)
        return RunFailed(
            "A loss, gradient or weight is not finite: training stops, nothing bad is saved",
            where=f"update {error.update}, {outputs.listed(report)}",
            found=error.what,
            expected="finite numbers",
            fix="lower train.learning_rate, set train.clip_norm, or look at these rows; all rows of"
            f" the update: {outputs.REPORTS / outputs.STOPPED}, also in {self.job.store.folder}",
        )

    def _step(
        self, plan: Plan, examples: Examples, valid: Examples, stop: Stop
    ) -> tuple[Step, dict[str, Activations]]:
        """The model with what is trained, checked on an example, and its stored activations."""
        settings = self.settings
        if settings.train.initial_adapters is not None:
            adapters.check(Path(settings.train.initial_adapters))
        folder = models.folder(self.manifest, settings.model)
        model, _ = models.load_model(folder, settings.model.dtype, lazy=plan.activation_cache)
        attached = attach(model, settings.train)
        if settings.train.initial_adapters is not None:
            adapters.load(Path(settings.train.initial_adapters), model)
        step = Step(model, attached, plan)
        micro = check_batch(examples, plan)
        rest = sum(x.nbytes for _, x in tree_flatten(model.parameters()))
        mx.reset_peak_memory()
        stored = frozen.stored(
            step,
            {"train": examples, "valid": valid},
            micro,
            settings=settings,
            manifest=self.manifest,
            device=self.device,
            stop=stop,
        )
        self._check = max(0, mx.get_peak_memory() - rest), micro.tokens_BT.size
        return step, stored


def machine_facts(settings: Settings, device: Device) -> dict[str, Any]:
    """What the bits of a run hang on besides its mathematics."""
    memory = {name: value for name, value in vars(settings.memory).items() if value != "auto"}
    return {"threads": device.threads, "device": device.kind, "memory": memory}


def updates_of(settings: Settings, examples: int) -> int:
    """Updates of the whole run."""
    train = settings.train
    return batching.updates_in_run(
        examples, train.effective_batch_size, train.epochs, train.updates
    )


def check_batch(examples: Examples, plan: Plan) -> batching.MicroBatch:
    """The example with targets whose length is nearest to `Plan.check_tokens`, alone."""
    example = batching.nearest(examples.lengths, examples.targets, plan.check_tokens)
    return batching.micro_batch(examples, np.array([example]), plan)


def set_limits(plan: Plan, wired_gb: float | str, device: Device) -> dict[str, float | None]:
    """Tell MLX's allocator how much it may keep, and Metal how much stays wired.

    Args:
        wired_gb: `memory.wired_limit_gb`; `auto` is what the system recommends.

    Returns:
        What is in effect, in GB; None where MLX's own limit or none is.
    """
    wired = None
    if plan.cache_limit_gb is not None:
        mx.set_cache_limit(int(plan.cache_limit_gb * 1e9))
    if device.kind == "metal":
        most = mx.device_info()["max_recommended_working_set_size"]
        wired = most if wired_gb == "auto" else min(most, int(wired_gb * 1e9))
        mx.set_wired_limit(wired)
    return {
        "cache_limit_gb": plan.cache_limit_gb,
        "wired_limit_gb": None if wired is None else wired / 1e9,
    }


def require_room(job: loop.Job, state: TrainState) -> None:
    """Say how much disk the checkpoints will take, and refuse to start without room for them.

    Raises:
        UserError: The disk has less free.
    """
    moments = optimizer.flat_state(state.optimizer)
    need = bytes_on_disk(job.step.model, moments, job.run.keep_last) / 1e9
    free = files.free_gb(job.store.folder)
    console.say(f"checkpoints take at most {need:.2f} GB of {free:.1f} GB free")
    if need > free:
        raise UserError(
            "The disk has no room for this run's checkpoints",
            where=str(job.store.folder),
            found=f"{free:.2f} GB free",
            expected=f"{need:.2f} GB",
            fix="free some space (`make clean-cache`), or lower run.keep_last",
        )
