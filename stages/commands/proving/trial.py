"""What the proof works on: the user's model and settings, a few examples, jobs of the real loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from stages.commands.proving import choice
from stages.core.config import schema
from stages.core.config.settings import Settings
from stages.core.machine.device import Device
from stages.core.memory.plan import Plan
from stages.core.memory.rule import by_rule
from stages.core.model import models
from stages.core.model.manifest import Manifest, read_manifest
from stages.core.model.trainable import Attached, attach, trained
from stages.core.tables import Examples, read_examples
from stages.core.update import adapters, batching, schedule
from stages.core.update.step import Step
from stages.train import loop, optimizer
from stages.train.checkpoint import Store
from stages.train.identity import TRAIN, VALID
from stages.train.session import check_batch
from stages.train.state import TrainState
from stages.train.stopping import Stop

MOST_ROWS = 8
"""Examples of an effective batch of the proof, where the run's is larger."""
BATCHES = 2.5
"""Effective batches in the proof's examples: the third update of a pass is a short one."""
VALID_EXAMPLES = 2
RANDOM_MODEL_RATE = 1e-4
"""Highest rate for a random model: a higher one amplifies any rounding."""
CONSTANT = schema.Schedule()


@dataclass(frozen=True)
class Trial:
    """The subject of the proof.

    Attributes:
        settings, device, manifest: Of the run.
        model, attached: Loaded, adapters attached, the user's dropout in place.
        start: The trained arrays at the start of a run.
        rows: Examples of an effective batch.
        examples, valid: Chosen and cut; the first `rows` are the batch whose gradient is compared.
        run_plan: The plan by rule for all examples of the run.
        right: Ways of computing that were checked and found right.
    """

    settings: Settings
    device: Device
    manifest: Manifest
    model: nn.Module
    attached: Attached
    start: Mapping[str, mx.array]
    rows: int
    examples: Examples
    valid: Examples
    run_plan: Plan
    right: set[tuple] = field(default_factory=set)

    @property
    def ids(self) -> np.ndarray:
        """The batch whose gradient is compared."""
        return np.arange(self.rows)

    @property
    def widths(self) -> tuple[int, ...]:
        """Padded lengths for the proof's examples."""
        return batching.widths(self.examples.lengths, int(self.examples.lengths.max()))

    @property
    def float32(self) -> bool:
        """Whether all is computed in float32."""
        floating = [x for _, x in tree_flatten(self.model.parameters()) if x.dtype != mx.uint32]
        return all(x.dtype == mx.float32 for x in floating)

    def plan(self, rows: int, **changes: object) -> Plan:
        """A plan of at most `rows` examples in a micro-batch, whatever their length."""
        width = max(self.widths)
        given = {"widths": self.widths, "loss_chunk": self.run_plan.loss_chunk, **changes}
        return Plan(batch_size=rows, batch_tokens=rows * 2 * width, **given)

    def back_to_start(self) -> None:
        """Give the trained arrays their first values."""
        self.model.update(tree_unflatten(list(self.start.items())))

    def job(self, step: Step, folder: Path, updates: int = 1, **train: object) -> loop.Job:
        """A job of the real loop on the proof's examples; `train` are fields of schema.Train."""
        given = {
            "effective_batch_size": self.rows,
            "learning_rate": self.rate,
            "schedule": CONSTANT,
            "epochs": None,
            "updates": updates,
            "stop_at_update": None,
            "updates_per_eval": None,
            "patience": None,
            "on_nonfinite": "stop",
        }
        wanted = replace(self.settings.train, **{**given, **train})
        return loop.Job(
            train=wanted,
            run=schema.Run(updates_per_save=updates, keep_last=2),
            step=step,
            examples=self.examples,
            valid=self.valid if wanted.updates_per_eval else _none_of(self.valid),
            rates=schedule.rates(wanted, updates),
            updates=updates,
            last=min(updates, wanted.stop_at_update or updates),
            store=Store(folder, folder.name),
            stop=Stop(),
        )

    def state(self) -> TrainState:
        """The state before the first update."""
        return TrainState(optimizer.build(self.settings.train, self.model))

    @property
    def rate(self) -> float:
        """The run's highest rate; for the built-in random model at most 1e-4."""
        rate = self.settings.train.learning_rate
        random = self.manifest.source.kind == "builtin"
        return min(rate, RANDOM_MODEL_RATE) if random else rate


def load(settings: Settings, device: Device) -> Trial:
    """Load the model, attach what is trained, choose examples.

    Raises:
        UserError: A file of an earlier stage is missing, or model and settings do not fit.
    """
    manifest = read_manifest()
    every, valid = read_examples(TRAIN), read_examples(VALID)
    rows = min(settings.train.effective_batch_size, MOST_ROWS)
    longest = choice.cap(rows, manifest.embedding_rows)
    wanted = choice.lengths(int(np.ceil(BATCHES * rows)), rows, longest)
    examples = choice.choose(every, wanted)
    if valid.targets.any():
        valid = choice.choose(valid, choice.lengths(VALID_EXAMPLES, VALID_EXAMPLES, longest))
    model, _ = models.load_model(models.folder(manifest, settings.model), settings.model.dtype)
    attached = attach(model, settings.train)
    if settings.train.initial_adapters is not None:
        adapters.load(Path(settings.train.initial_adapters), model)
    return Trial(
        settings=settings,
        device=device,
        manifest=manifest,
        model=model,
        attached=attached,
        start=trained(model),
        rows=rows,
        examples=examples,
        valid=valid if valid.targets.any() else _none_of(valid),
        run_plan=by_rule(settings, manifest, every.lengths, device.kind),
    )


@contextmanager
def checked_step(trial: Trial, plan: Plan) -> Iterator[Step]:
    """A step under a plan, checked on a real micro-batch as training checks it before update 1."""
    step = Step(trial.model, trial.attached, plan)
    way = (
        plan.recompute,
        plan.recompute_place,
        plan.attention_block,
        plan.compiled,
        plan.loss_chunk > 0,
    )
    try:
        if way not in trial.right and not step.check(check_batch(trial.examples, plan)):
            trial.right.add(way)
        yield step
    finally:
        step.close()


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block; it draws other noise for other micro-batches."""
    found = [(x, x._p_1) for x in model.modules() if isinstance(x, nn.Dropout)]
    try:
        for module, _ in found:
            module._p_1 = 1.0
        yield
    finally:
        for module, kept in found:
            module._p_1 = kept


def _none_of(examples: Examples) -> Examples:
    """No examples, as a table."""
    nothing = np.zeros(0, np.int64)
    return replace(
        examples,
        offsets=np.zeros(1, np.int64),
        tokens=examples.tokens[:0],
        target_mask=examples.target_mask[:0],
        row=nothing,
        piece=nothing.astype(np.int32),
    )
