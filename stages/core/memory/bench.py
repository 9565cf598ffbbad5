"""A loaded model on which points are measured: the same `Step` that trains, one phase at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from stages.core.activations.handover import read_and_free_embedding
from stages.core.config import schema
from stages.core.layers.exponentials import cheap_swiglu
from stages.core.layers.staged import Boundary, UnsupportedModel
from stages.core.memory.alone import active, attention_alone, settle
from stages.core.memory.attention import Calls, blocked
from stages.core.memory.points import Point, Reading, Rest
from stages.core.memory.recompute import chosen_layers, recomputing_staged
from stages.core.model import models
from stages.core.model.trainable import attach
from stages.core.update.batching import MicroBatch
from stages.core.update.loss import gathered_loss
from stages.core.update.step import Step

RECURRENT = ("delta", "mamba", "ssm", "recurrent", "rwkv", "linearattention", "lightning")
"""Parts of class names of layers with a state that runs through time."""

MOST_RUNS, ENOUGH_SECONDS = 3, 0.1
"""A point is run up to so often, until so many seconds are spent."""

CLASSES = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "muon": optim.Muon,
    "adafactor": optim.Adafactor,
}


class Bench:
    """One model, adapters attached, with optimizer state and a summed gradient, as in training.

    Args:
        folder: Of the model.
        dtype: `model.dtype`.
        train: What is trained.
        vocabulary: Token ids are drawn below it.
        warm: Run each point once before it is measured, as on a GPU, which compiles kernels then.

    Attributes:
        rest: What rests in memory now.
    """

    def __init__(
        self, folder: Path, dtype: str, train: schema.Train, vocabulary: int, warm: bool
    ) -> None:
        self.model, _ = models.load_model(folder, dtype)
        attached = attach(self.model, train)
        mx.eval(self.model.parameters())
        whole = active()
        self.step = Step(self.model, attached, Point("whole").plan())
        self.vocabulary = vocabulary
        self.warm = warm
        self.shapes: dict[str, tuple] = {}
        parameters = self.model.trainable_parameters()
        self.optimizer = CLASSES[train.optimizer](
            learning_rate=1e-5, **(train.optimizer_config.get(train.optimizer) or {})
        )
        self.optimizer.init(parameters)
        self.total = tree_map(lambda x: mx.zeros(x.shape, mx.float32), parameters)
        mx.eval(self.total, self.optimizer.state)
        layers = list(self.model.layers)
        self.calls = self._attention_calls()
        self.rest = Rest(
            whole=whole,
            above=whole,
            trained=sum(x.nbytes for _, x in tree_flatten(parameters)),
            state=active() - whole,
            layers=len(layers),
            cut=attached.cut,
            recurrent=sum(is_recurrent(layer) for layer in layers[attached.cut :]),
            attention=self.calls.blocked,
            causal=all(call.masked == "causal" for call in self.calls.kinds),
            at_targets=self.step.staged is not None,
            notes=tuple(self.step.notes),
        )

    def make_ready(self, point: Point) -> None:
        """Free the frozen layers before the first point that trains from stored activations."""
        if not point.way.cached or self.shapes or self.step.staged is None or not self.rest.cut:
            return
        cut, tokens_BT = self.rest.cut, mx.zeros((1, 8), mx.int32)
        try:
            boundary = self.step.staged.frozen(tokens_BT, cut)
            mx.eval(boundary)
            axes = self.step.staged.boundary_axes(cut)
            self.step.staged.free_below(cut)
        except UnsupportedModel as error:
            note = f"activation cache is off: {error.reason}"
            self.rest = replace(self.rest, notes=(*self.rest.notes, note))
            return
        read_and_free_embedding(self.step.staged, tokens_BT, boundary, cut)
        self.shapes = {name: (x.shape, x.dtype, axes[name]) for name, x in boundary.items()}
        del boundary
        settle()
        self.rest = replace(self.rest, above=active() - self.rest.state)

    def read(self, point: Point) -> Reading:
        """Measure one point.

        Raises:
            ValueError: It asks for what is off on this architecture.
            RuntimeError: Memory ran out, on backends that say so.
        """
        if point.way.cached and not self.shapes:
            raise ValueError("activation cache is off")
        if point.kind in ("head", "frozen") and self.step.staged is None:
            raise ValueError("the parts of this architecture can't be run alone")
        if point.kind == "attention" and not self.calls.kinds:
            raise ValueError("attention is computed inside the architecture")
        self.step.plan = point.plan()
        return getattr(self, f"_{point.kind}")(point)

    def _whole(self, point: Point) -> Reading:
        micro = self.micro_batch(point)

        def run() -> None:
            boundary = self._boundary(point)
            self.step.gradient(micro, micro.targets, self.total, boundary)

        peak, seconds = self._measured(run)
        return Reading(point, peak=peak, seconds=seconds)

    def _layers(self, point: Point) -> Reading:
        reading = self._whole(point)
        return replace(reading, kept=0 if self.step.staged is None else self._kept(point))

    def _kept(self, point: Point) -> int:
        """Bytes above the resting state that the forward pass leaves for the backward pass."""
        settle()
        before = active()
        tokens_BT = mx.array(self.micro_batch(point).tokens_BT)
        boundary, cut = self._boundary(point), self.rest.cut if point.way.cached else 0
        trained = range(self.rest.cut, self.rest.layers)
        chosen = chosen_layers(trained, point.way.recompute, point.way.place)
        parameters = self.model.trainable_parameters()

        def total(parameters: dict) -> mx.array:
            self.model.update(parameters)
            return self.step.staged.top(tokens_BT, boundary, cut).sum()

        self.model.train()
        with ExitStack() as settings:
            settings.enter_context(blocked(point.way.attention_block))
            settings.enter_context(cheap_swiglu())
            settings.enter_context(recomputing_staged(self.step.staged, chosen))
            value, gradient = mx.value_and_grad(total)(parameters)
        self.model.update(parameters)
        mx.eval(value)
        kept = active() - before
        del gradient
        return kept

    def _head(self, point: Point) -> Reading:
        staged, count = self.step.staged, point.targets
        parameters = self.model.trainable_parameters()
        shape, dtype = self._hidden_shape()
        positions_N, labels_N = mx.arange(count), mx.zeros((count,), mx.int32)
        weights_N, divisor = mx.ones((count,)), mx.array(float(count))

        def loss(parameters: dict, hidden: mx.array) -> mx.array:
            self.model.update(parameters)
            return gathered_loss(
                staged.head,
                hidden,
                positions_N,
                labels_N,
                weights_N,
                divisor=divisor,
                chunk=point.loss_chunk or None,
                head_parameters=staged.head_parameters(),
            )

        def run() -> None:
            hidden = mx.random.normal((*shape[:-3], 1, count, shape[-1]), dtype)
            mx.eval(mx.value_and_grad(loss, argnums=[0, 1])(parameters, hidden))
            self.model.update(parameters)

        peak, seconds = self._measured(run)
        return Reading(point, peak=peak, seconds=seconds)

    def _attention(self, point: Point) -> Reading:
        """Backward pass of one layer's attention alone, beside its inputs and what is kept."""
        call = max(self.calls.kinds, key=lambda x: x.heads * (x.size + x.value_size))
        found = []
        settle()
        # The first run is not timed: in training the allocator has the memory at hand.
        while len(found) < 2 or (
            len(found) <= MOST_RUNS and sum(x[2] for x in found[1:]) < ENOUGH_SECONDS
        ):
            found.append(attention_alone(call, point.rows, point.width, point.way.attention_block))
        peaks, kept, seconds = zip(*found, strict=True)
        return Reading(point, peak=max(peaks), kept=max(kept), seconds=min(seconds[1:]))

    def _frozen(self, point: Point) -> Reading:
        tokens_BT = mx.array(self.micro_batch(point).tokens_BT)

        def run() -> None:
            self.model.eval()
            with blocked(point.way.attention_block), cheap_swiglu():
                mx.eval(self.step.staged.frozen(tokens_BT, self.rest.cut))

        peak, seconds = self._measured(run)
        return Reading(point, peak=peak, seconds=seconds)

    def _check(self, point: Point) -> Reading:
        micro = self.micro_batch(point)
        peak, seconds = self._measured(lambda: self.step.check(micro), repeat=False)
        staged = self.step.staged is not None
        self.rest = replace(self.rest, at_targets=staged, notes=tuple(self.step.notes))
        return Reading(point, peak=peak, seconds=seconds)

    def _update(self, point: Point) -> Reading:
        def run() -> None:
            parameters = self.model.trainable_parameters()
            clipped = tree_map(lambda g: g * 0.5, self.total)
            gradient = tree_map(lambda g, p: g.astype(p.dtype), clipped, parameters)
            self.optimizer.update(self.model, gradient)
            mx.eval(self.model.trainable_parameters(), self.optimizer.state)

        peak, seconds = self._measured(run)
        return Reading(point, peak=peak, seconds=seconds)

    def _measured(self, run: Callable[[], object], repeat: bool = True) -> tuple[int, float]:
        """(highest peak above rest, least seconds); short runs are repeated.

        On the CPU seconds are never more than the processor's own: other programs don't count.
        """
        if self.warm and repeat:
            run()
        peaks, seconds = [], []
        while not peaks or (repeat and len(peaks) < MOST_RUNS and sum(seconds) < ENOUGH_SECONDS):
            settle()
            before, started, worked = active(), time.perf_counter(), time.process_time()
            mx.reset_peak_memory()
            run()
            mx.synchronize()
            seconds.append(time.perf_counter() - started)
            if not self.warm:
                seconds[-1] = min(seconds[-1], time.process_time() - worked)
            peaks.append(max(0, mx.get_peak_memory() - before))
        return max(peaks), min(seconds)

    def micro_batch(self, point: Point) -> MicroBatch:
        """Random tokens of the point's shape, its targets at the ends of the rows."""
        draw = np.random.default_rng(point.rows * point.width)
        rows, width = point.rows, max(2, point.width)
        per_row = min(width - 1, -(-point.targets // rows))
        mask_BT = np.zeros((rows, width), bool)
        mask_BT[:, width - per_row :] = True
        surplus = max(0, int(mask_BT.sum()) - point.targets)
        mask_BT[:surplus, width - per_row] = False
        return MicroBatch(
            ids=np.arange(rows),
            tokens_BT=draw.integers(0, self.vocabulary, (rows, width)).astype(np.int32),
            mask_BT=mask_BT,
            targets=int(np.count_nonzero(mask_BT)),
            tokens=rows * width,
        )

    def _boundary(self, point: Point) -> Boundary:
        """Random numbers in the shape of stored activations, or {} where they aren't used."""
        if not point.way.cached:
            return {}
        boundary = {}
        for name, (shape, dtype, (batch, length)) in self.shapes.items():
            sized = list(shape)
            sized[batch], sized[length] = point.rows, max(2, point.width)
            boundary[name] = mx.random.normal(sized).astype(dtype)
        mx.eval(boundary)
        return boundary

    def _hidden_shape(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Of the last layer's output; traced, not computed."""
        point = replace(self._smallest(), way=replace(Point("head").way, cached=bool(self.shapes)))
        tokens_BT = mx.zeros((1, 2), mx.int32)
        cut = self.rest.cut if self.shapes else 0
        hidden = self.step.staged.top(tokens_BT, self._boundary(point), cut)
        return hidden.shape, hidden.dtype

    def _smallest(self) -> Point:
        return Point("layers", rows=1, width=2)

    def _attention_calls(self) -> Calls:
        """Of a forward pass that is traced, not computed."""
        with blocked(8) as calls:
            self.model(mx.zeros((1, 16), mx.int32))
        return calls


def is_recurrent(layer: nn.Module) -> bool:
    """Whether a layer has a state that runs through time, by the names of its classes."""
    names = {type(module).__name__.lower() for module in layer.modules()}
    return any(part in name for part in RECURRENT for name in names)
