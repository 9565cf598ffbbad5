"""The losses of every target of a micro-batch, under the base model and under the tuned one.

Both are one loaded model: the base is the same modules with the trained parameters at the values
they had before training (an adapter that adds nothing, or the original weights). The layers below
the first trained one are equal in both, so they run once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from stages.core.activations.reader import Activations
from stages.core.config import schema
from stages.core.errors import RunFailed, listed
from stages.core.layers.staged import UnsupportedModel, swapped_parameters
from stages.core.memory.plan import Plan
from stages.core.update import adapters
from stages.core.update.adapters import Attached
from stages.core.update.batching import MicroBatch
from stages.core.update.step import Step, TargetLosses

TOLERANCE = 1e-5
COARSE_TOLERANCE = 2e-2
"""Relative error of a micro-batch's mean loss, shared against whole: float32, and all else."""


@dataclass(frozen=True)
class Scored:
    """The M targets of one micro-batch.

    Attributes:
        example: int64 (M,): which example each target stands in.
        position: int64 (M,): its index in the example: how many tokens come before it.
        base, tuned: Losses and hits under each model.
    """

    example: np.ndarray
    position: np.ndarray
    base: TargetLosses
    tuned: TargetLosses


class Pair:
    """One model in memory that stands for two.

    Args:
        model: With adapters attached and the trained values loaded.
        attached: What is trained.
        base: By flat name, what the trained parameters were before training.
        plan: How micro-batches are computed; without a gradient nothing is recomputed or compiled.

    Attributes:
        shared: The frozen layers run once for both.
        stored: Their output on the disk, in place of running them.
    """

    def __init__(
        self, model: nn.Module, attached: Attached, base: Mapping[str, mx.array], plan: Plan
    ) -> None:
        self.model = model
        self.base = dict(base)
        self.cut = attached.cut
        self.step = Step(model, attached, replace(plan, compiled=False, recompute=0))
        self.shared = self.cut > 0 and self.step.staged is not None
        self.stored: Activations | None = None

    def close(self) -> None:
        """Put the model's layers back as they were."""
        if self.stored is not None:
            self.stored.close()
        self.step.close()

    def expect(self, micros: Sequence[MicroBatch]) -> None:
        """Say which micro-batches will be scored, in order."""
        if self.stored is not None:
            self.stored.expect(micros)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """The model is the base model inside the block."""
        with swapped_parameters(self.model, self.base):
            yield

    def score(self, micro: MicroBatch) -> Scored:
        """Losses of all targets of a micro-batch under both models.

        Raises:
            RunFailed: A loss is not finite; the examples are named.
        """
        base, tuned = self._both(micro, self.shared)
        example = np.asarray(micro.ids)[base.row]
        for name, losses in (("base", base), ("tuned", tuned)):
            bad = np.unique(example[~np.isfinite(losses.loss)])
            if bad.size:
                raise RunFailed(
                    f"The {name} model's loss is not finite",
                    where="example " + listed([str(i) for i in bad]),
                    expected="finite numbers",
                    fix="look at these examples; model.dtype=float32 rules out overflow",
                )
        return Scored(example, base.position, base, tuned)

    def check(self, micro: MicroBatch) -> str:
        """Compare the shared way with two whole passes on a real micro-batch; off if it differs.

        Returns:
            One line that says what was switched off, or "".
        """
        if not self.shared:
            return ""
        problem = self._problem(micro)
        if not problem:
            return ""
        self.shared = False
        return f"frozen layers run twice, for base and for tuned: {problem}"

    def _problem(self, micro: MicroBatch) -> str:
        try:
            shared = self._both(micro, shared=True)
        except UnsupportedModel as error:
            return error.reason
        whole = self._both(micro, shared=False)
        error = max(
            abs(a.loss.mean() / b.loss.mean() - 1) for a, b in zip(shared, whole, strict=True)
        )
        return "" if error <= self._tolerance() else f"the loss would be off by {error:.1e}"

    def _tolerance(self) -> float:
        weights = [x for _, x in tree_flatten(self.model.parameters())]
        return TOLERANCE if all(x.dtype == mx.float32 for x in weights) else COARSE_TOLERANCE

    def _both(self, micro: MicroBatch, shared: bool) -> tuple[TargetLosses, TargetLosses]:
        boundary = None
        if shared and self.stored is not None:
            boundary = self.stored.boundary(micro)
        elif shared:
            boundary = self.step.staged.frozen(mx.array(micro.tokens_BT), self.cut)
            mx.eval(boundary)
        with self.as_base():
            base = self.step.target_losses(micro, boundary)
        return base, self.step.target_losses(micro, boundary)


def open_pair(model: nn.Module, folder: Path, plan: Plan) -> Pair:
    """Turn a freshly loaded base model into the pair that an adapter folder makes of it.

    Raises:
        UserError: The folder is missing, unreadable, or made for another model.
    """
    attached = adapters.attach(model, _shape(adapters.read_config(folder)))
    base = adapters.trained(model)
    adapters.load(folder, model)
    model.eval()
    return Pair(model, attached, base, plan)


def _shape(config: Mapping[str, Any]) -> schema.Train:
    """The settings that shaped the adapters, out of adapter_config.json."""
    lora = config.get("lora_parameters") or {}
    return schema.Train(
        fine_tune_type=config["fine_tune_type"],
        num_layers=config["num_layers"],
        lora_parameters=schema.LoraParameters(**{**lora, "dropout": 0.0}),
    )
