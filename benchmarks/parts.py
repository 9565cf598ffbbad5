"""The parts of one update, each timed alone. Needs MLX prepared.

A part is a function of arrays: built (Python makes the graph), then evaluated (the device works).
The backward pass of the trained layers is forward and backward together, less forward alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.tuner import trainer

from stages.core.layers.exponentials import cheap_swiglu
from stages.core.layers.staged import Boundary, StagedModel
from stages.core.memory.attention import blocked
from stages.core.memory.plan import Plan
from stages.core.memory.recompute import chosen_layers, recomputing_staged
from stages.core.update.batching import MicroBatch
from stages.core.update.loss import gathered_loss, target_positions

FROZEN, FORWARD, BACKWARD = "frozen layers", "trained layers, forward", "trained layers, backward"
HEAD = "head and loss"
TRIES = 3


class Parts:
    """Times the parts of one model, summed over the micro-batches that are given to it.

    Args:
        model: Adapters attached.
        staged: The same, by parts.
        cut: The first trained layer.
        compiled: Whether every part is compiled, as the whole is.
        around: Gives the functions in force around a part.

    Attributes:
        seconds: Of the device, by part.
        built: Seconds in which Python builds the graphs of one pass of all parts.
    """

    def __init__(
        self,
        model: nn.Module,
        staged: StagedModel,
        cut: int,
        compiled: bool,
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.model = model
        self.staged = staged
        self.cut = cut
        self.around = around
        self.make = mx.compile if compiled else lambda function: function
        self.seconds = dict.fromkeys((FROZEN, FORWARD, BACKWARD, HEAD), 0.0)
        self.built = 0.0

    def frozen(self, tokens_BT: mx.array) -> Boundary:
        """Time the frozen layers; what they give, {} where there are none."""
        if not self.cut:
            return {}
        run = self.make(lambda tokens: self.staged.frozen(tokens, self.cut))
        seconds, built, boundary = self._timed(lambda: run(tokens_BT))
        self.seconds[FROZEN] += seconds
        self.built += built
        return boundary

    def layers(self, tokens_BT: mx.array, boundary: Boundary) -> mx.array:
        """Time the trained layers, both ways; the output of the last one."""
        parameters = self.model.trainable_parameters()
        cut = self.cut if boundary else 0

        def top(parameters: dict, tokens: mx.array, boundary: Boundary) -> mx.array:
            self.model.update(parameters)
            return self.staged.top(tokens, boundary, cut)

        def total(parameters: dict, tokens: mx.array, boundary: Boundary) -> mx.array:
            return top(parameters, tokens, boundary).astype(mx.float32).sum()

        forward, both = self.make(top), self.make(mx.value_and_grad(total))
        given = (parameters, tokens_BT, boundary)
        try:
            alone, _, hidden = self._timed(lambda: forward(*given))
            together, built, _ = self._timed(lambda: both(*given))
        finally:
            self.model.update(parameters)
        self.seconds[FORWARD] += alone
        self.seconds[BACKWARD] += max(0.0, together - alone)
        self.built += built
        return hidden

    def head(self, loss: Callable[[mx.array], mx.array], hidden: mx.array) -> None:
        """Time head and loss with the gradient for the hidden states."""
        run = self.make(mx.value_and_grad(loss))
        seconds, built, _ = self._timed(lambda: run(hidden))
        self.seconds[HEAD] += seconds
        self.built += built

    def _timed(self, build: Callable[[], Any]) -> tuple[float, float, Any]:
        """(least seconds of the device, least seconds of building, what came out)."""
        self.model.train()
        seconds, built = [], []
        with self.around():
            found = build()
            mx.eval(found)
            for _ in range(TRIES):
                found = None
                mx.synchronize()
                started = time.perf_counter()
                found = build()
                made = time.perf_counter()
                mx.eval(found)
                mx.synchronize()
                built.append(made - started)
                seconds.append(time.perf_counter() - made)
        return min(seconds), min(built), found


def of_ours(parts: Parts, micros: Sequence[tuple[MicroBatch, Boundary]], plan: Plan) -> None:
    """Time the parts of our micro-batches; where a boundary is stored, no frozen layer runs."""
    for micro, stored in micros:
        tokens_BT = mx.array(micro.tokens_BT)
        hidden = parts.layers(tokens_BT, stored or parts.frozen(tokens_BT))
        parts.head(_loss_at_targets(parts.staged, micro, plan), hidden)


def of_theirs(parts: Parts, batches: Sequence[tuple[mx.array, mx.array]]) -> None:
    """Time the parts of mlx-lm's batches: its loss makes the logits of every position."""
    for batch, lengths in batches:
        tokens_BT = batch[:, :-1]
        hidden = parts.layers(tokens_BT, parts.frozen(tokens_BT))
        parts.head(_loss_of_all(parts.staged, batch, lengths), hidden)


def _loss_at_targets(staged: StagedModel, micro: MicroBatch, plan: Plan) -> Callable:
    gathered = target_positions(micro.tokens_BT, micro.mask_BT, micro.targets)
    given = [mx.array(x) for x in gathered]
    divisor, chunk = mx.array(float(micro.targets)), plan.loss_chunk or None
    return lambda hidden: gathered_loss(staged.head, hidden, *given, divisor=divisor, chunk=chunk)


def _loss_of_all(staged: StagedModel, batch: mx.array, lengths: mx.array) -> Callable:
    def loss(hidden_BTD: mx.array) -> mx.array:
        rows, width, _ = hidden_BTD.shape
        logits = lambda _: staged.head(mx.flatten(hidden_BTD, 0, 1)).reshape(rows, width, -1)
        return trainer.default_loss(logits, batch, lengths)[0]

    return loss


def functions(plan: Plan, staged: StagedModel, cut: int) -> Callable[[], AbstractContextManager]:
    """What is in force around our parts under a plan, recomputation too."""
    trained = range(cut, staged.facts.count)
    chosen = chosen_layers(trained, plan.recompute, plan.recompute_place)

    @contextmanager
    def around() -> Iterator[None]:
        with blocked(plan.attention_block), cheap_swiglu(), recomputing_staged(staged, chosen):
            yield

    return around
