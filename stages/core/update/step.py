"""One micro-batch under a plan: its loss and gradient, or its losses target by target.

Training, validation, the planner, `prove` and the benchmarks all take this one step, so what one of
them measures or checks is what the others do. The mathematics stands in stages.core.update.loss; a
plan only says how it is computed.

    step = Step(model, attached, plan)
    loss, gradient = step.gradient(micro, divisor)               # the first micro-batch
    more, gradient = step.gradient(micro, divisor, gradient)     # adds the next one to it
    step.close()

Shapes: B rows, T tokens (padded), N targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_map

from stages.core.layers.exponentials import cheap_swiglu
from stages.core.layers.staged import Boundary, StagedModel, UnsupportedModel, layer_list
from stages.core.memory.attention import blocked
from stages.core.memory.plan import Plan
from stages.core.memory.recompute import chosen_layers, recompute, recomputing
from stages.core.memory.throttle import throttled
from stages.core.model.trainable import Attached
from stages.core.update import batching, check
from stages.core.update.batching import MicroBatch
from stages.core.update.loss import (
    cross_entropy,
    gathered_loss,
    target_losses,
    target_positions,
)

Gradient = dict[str, Any]
"""A tree of float32 arrays, shaped like `model.trainable_parameters()`."""


@dataclass(frozen=True)
class TargetLosses:
    """The N targets of one micro-batch.

    Attributes:
        loss: float32 (N,), nats.
        correct: bool (N,): the likeliest token is the target.
        row: int64 (N,): row of the micro-batch.
        position: int64 (N,): the target's index in that row.
    """

    loss: np.ndarray
    correct: np.ndarray
    row: np.ndarray
    position: np.ndarray


class Step:
    """Loss and gradient of micro-batches of one model under one plan.

    Args:
        model: Loaded, adapters attached, the rest frozen.
        attached: What is trained.
        plan: How to compute.

    Attributes:
        plan: The plan in effect; `check` may have switched parts of it off.
        staged: The model's parts, or None where there is no way into this architecture: then the
            whole model runs and makes all its logits.
        notes: One line for everything that was switched off.
    """

    def __init__(self, model: nn.Module, attached: Attached, plan: Plan) -> None:
        self.model = model
        self.attached = attached
        self.plan = plan
        self.notes: list[str] = []
        self.staged: StagedModel | None = None
        self._traced: tuple[tuple[Plan, bool], Callable] | None = None
        self._mode: bool | None = None
        try:
            self.staged = StagedModel(model)
        except UnsupportedModel as error:
            self.notes.append(f"loss at targets is off: {error.reason}")

    def close(self) -> None:
        """Put the layers' own classes back."""
        if self.staged is not None:
            self.staged.close()
            self.staged = None

    def gradient(
        self,
        micro: MicroBatch,
        divisor: int,
        total: Gradient | None = None,
        boundary: Boundary | None = None,
    ) -> tuple[float, Gradient]:
        """Loss of a micro-batch and its gradient, computed when this returns.

        Args:
            micro: With at least one target.
            divisor: Targets of the whole update.
            total: Gradient of the update's earlier micro-batches, to add this one's to.
            boundary: Output of the frozen layers for these tokens, in place of running them.

        Returns:
            The sum of the micro-batch's losses over `divisor`; its gradient added to `total`.
        """
        self._training(True)
        return self.evaluated(micro, divisor, total, boundary)

    def target_losses(self, micro: MicroBatch, boundary: Boundary | None = None) -> TargetLosses:
        """Loss of each target of a micro-batch: no gradient, no dropout, no random number."""
        self._training(False)
        row, position = np.nonzero(micro.mask_BT)
        inputs = self._inputs(micro, 1, boundary)
        with throttled(self.plan.memory_limit_gb), self._functions():
            if self.staged is None:
                logits_NV = self._logits(inputs)
                loss_N = cross_entropy(logits_NV, inputs["labels_N"])
                correct_N = mx.argmax(logits_NV, axis=-1) == inputs["labels_N"]
            else:
                loss_N, correct_N = target_losses(
                    self.staged.head,
                    self._hidden(inputs),
                    inputs["positions_N"],
                    inputs["labels_N"],
                    self.plan.loss_chunk or None,
                )
            mx.eval(loss_N, correct_N)
        keep = slice(len(row))
        return TargetLosses(np.array(loss_N)[keep], np.array(correct_N)[keep], row, position)

    def check(self, micro: MicroBatch, boundary: Boundary | None = None) -> list[str]:
        """Switch off what is wrong on this architecture; see stages.core.update.check.

        Returns:
            `notes`: one line for everything that is switched off.
        """
        check.check(self, micro, boundary)
        return self.notes

    def _training(self, on: bool) -> None:
        """Put the model into a mode; a walk through all modules, so only where it changes."""
        if self._mode is not on or self.model.training is not on:
            self.model.train(on)
            self._mode = on

    def without_dropout(self) -> None:
        """Put the model into the mode of training, all dropouts off."""
        self.model.train()
        self._mode = None  # neither of the two
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()

    def forget_trace(self) -> None:
        """Let go of what was compiled, and of the weights that it holds."""
        self._traced = None

    def evaluated(
        self, micro: MicroBatch, divisor: int, total: Gradient | None, boundary: Boundary | None
    ) -> tuple[float, Gradient]:
        """As `gradient`, in the mode the model is in."""
        parameters = self.model.trainable_parameters()
        kept = tree_map(lambda x: x, parameters)
        run = self._sum
        if self.plan.compiled:
            # One trace for first and later micro-batches.
            total = zeros_like(parameters) if total is None else total
            run = self._compiled()
        try:
            with self._settings_in_force():
                loss, total = run(parameters, total, self._inputs(micro, divisor, boundary))
                mx.eval(loss, total)
        finally:
            # Tracing leaves its own array objects in the model, and after an error in the tree too.
            self.model.update(kept)
        return loss.item(), total

    def _compiled(self) -> Callable:
        """`_sum` compiled for the way in force: a trace of an earlier one would run that one."""
        way = (self.plan, self.staged is None)
        if self._traced is None or self._traced[0] != way:
            state = [mx.random.state]
            self._traced = (way, mx.compile(self._sum, inputs=state, outputs=state))
        return self._traced[1]

    def _inputs(self, micro: MicroBatch, divisor: int, boundary: Boundary | None) -> dict[str, Any]:
        count = micro.targets
        if self.plan.compiled:
            count = padded_targets(count, self.plan.loss_chunk)
        positions, labels, weights = target_positions(micro.tokens_BT, micro.mask_BT, count)
        return {
            "tokens_BT": mx.array(micro.tokens_BT),
            "positions_N": mx.array(positions),
            "labels_N": mx.array(labels),
            "weights_N": mx.array(weights),
            "divisor": mx.array(float(divisor)),
            "boundary": boundary or {},
        }

    def _sum(
        self, parameters: dict, total: Gradient | None, inputs: dict[str, Any]
    ) -> tuple[mx.array, Gradient]:
        """Loss, and gradient in float32 added to `total`; pure, so that it can be compiled."""
        loss, gradient = mx.value_and_grad(self._loss)(parameters, inputs)
        gradient = tree_map(lambda g: g.astype(mx.float32), gradient)
        return loss, gradient if total is None else tree_map(mx.add, total, gradient)

    def _loss(self, parameters: dict, inputs: dict[str, Any]) -> mx.array:
        self.model.update(parameters)
        labels_N, weights_N = inputs["labels_N"], inputs["weights_N"]
        if self.staged is None:
            losses_N = cross_entropy(self._logits(inputs), labels_N)
            return (losses_N * weights_N).sum() / inputs["divisor"]
        return gathered_loss(
            self.staged.head,
            self._hidden(inputs),
            inputs["positions_N"],
            labels_N,
            weights_N,
            divisor=inputs["divisor"],
            chunk=self.plan.loss_chunk or None,
            head_parameters=self.staged.head_parameters(),
        )

    def _hidden(self, inputs: dict[str, Any]) -> mx.array:
        cut = self.attached.cut if inputs["boundary"] else 0
        return self.staged.top(inputs["tokens_BT"], inputs["boundary"], cut)

    def _logits(self, inputs: dict[str, Any]) -> mx.array:
        """Logits (N, V) at the targets, out of all of them."""
        logits_BTV = self.model(inputs["tokens_BT"])
        return mx.flatten(logits_BTV, 0, 1)[inputs["positions_N"]]

    @contextmanager
    def _functions(self) -> Iterator[None]:
        """Functions of the same meaning in place of mlx-lm's own."""
        with blocked(self.plan.attention_block), cheap_swiglu():
            yield

    @contextmanager
    def _settings_in_force(self) -> Iterator[None]:
        """Recomputation, attention blocks and memory limit as planned, around one evaluation."""
        layers = layer_list(self.model) if self.plan.recompute else []
        trained = range(self.attached.cut, len(layers))
        chosen = chosen_layers(trained, self.plan.recompute, self.plan.recompute_place)
        with throttled(self.plan.memory_limit_gb), self._functions():
            if self.staged is None:
                with recomputing([layers[i] for i in chosen]):
                    yield
                return
            try:
                for i in chosen:
                    self.staged.run_layer_with(i, recompute)
                yield
            finally:
                for i in chosen:
                    self.staged.run_layer_with(i, None)


def zero_gradient(model: nn.Module) -> Gradient:
    """The gradient of an update without a target."""
    return zeros_like(model.trainable_parameters())


def zeros_like(parameters: Gradient) -> Gradient:
    """A tree of the same shapes, in float32."""
    return tree_map(lambda x: mx.zeros(x.shape, mx.float32), parameters)


def padded_targets(count: int, chunk: int) -> int:
    """Room for at least `count` targets out of few sizes: 1, 2, 3, 4, 6, 8, 12, 16 … chunks."""
    chunk = chunk or 64
    return chunk * batching.few(max(1, -(-count // chunk)))
