"""Recompute layers in the backward pass instead of keeping their activations, layer by layer.

Gradient checkpointing bound to single layers: any class, any subset, undone afterwards. With a
`StagedModel` give `recompute` to `run_layer_with`; without one use the context `recomputing`.
mlx-lm's own `grad_checkpoint` replaces `__call__` on the class of layer 0: all or nothing, for
good, and only that class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from stages.core.layers.staged import StagedModel, swapped_parameters
from stages.core.memory.placement import chosen_layers

__all__ = ["chosen_layers", "recompute", "recomputing", "recomputing_staged"]


def recompute(layer: nn.Module, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `call(layer, *args, **kwargs)`, keeping only inputs and outputs for the backward pass.

    A `Runner` of stages.core.layers.staged. Every array among the arguments is an explicit input,
    since a checkpointed function passes gradients to those only; so are the layer's trained
    parameters. No gradient passes to integers and booleans. Dropout draws the same noise both
    times.
    """
    arrays = [x for _, x in tree_flatten((args, kwargs)) if isinstance(x, mx.array)]
    trained = dict(tree_flatten(layer.trainable_parameters()))
    noisy = active_dropouts(layer)
    key = mx.random.randint(0, 2**32 - 1, (2,), mx.uint32) if noisy else None

    def run(parameters: dict[str, mx.array], given: list[mx.array], key: mx.array | None) -> Any:
        rest = iter([_constant(x) for x in given])
        fill = lambda x: next(rest) if isinstance(x, mx.array) else x
        inner_args, inner_kwargs = tree_map(fill, (args, kwargs))
        with swapped_parameters(layer, parameters), keyed(noisy, key):
            return call(layer, *inner_args, **inner_kwargs)

    return mx.checkpoint(run)(trained, arrays, key)


@contextmanager
def recomputing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute these layers of a plain model inside the block; their classes are put back."""
    classes = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = _recomputed(type(layer))
        yield
    finally:
        for layer, original in zip(layers, classes, strict=True):
            layer.__class__ = original


@contextmanager
def recomputing_staged(staged: StagedModel, indices: Sequence[int]) -> Iterator[None]:
    """Recompute these layers of a staged model inside the block."""
    try:
        for index in indices:
            staged.run_layer_with(index, recompute)
        yield
    finally:
        for index in indices:
            staged.run_layer_with(index, None)


def active_dropouts(layer: nn.Module) -> list[nn.Dropout]:
    """The layer's dropouts that would draw noise now."""
    found = [module for module in layer.modules() if isinstance(module, nn.Dropout)]
    return [module for module in found if module.training and module._p_1 < 1]


@contextmanager
def keyed(dropouts: Sequence[nn.Dropout], key: mx.array | None) -> Iterator[None]:
    """Let these dropouts draw their noise from `key`, so that a second run draws the same."""
    classes = [type(module) for module in dropouts]
    keys = mx.random.split(mx.stop_gradient(key), len(dropouts)) if dropouts else []
    try:
        for module, own in zip(dropouts, keys, strict=True):
            module.__class__ = _keyed_dropout(type(module), own)
        yield
    finally:
        for module, original in zip(dropouts, classes, strict=True):
            module.__class__ = original


def _constant(x: mx.array) -> mx.array:
    return x if mx.issubdtype(x.dtype, mx.floating) else mx.stop_gradient(x)


def _recomputed(original: type) -> type:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recompute(self, original.__call__, args, kwargs)

    return type(original.__name__, (original,), {"__call__": __call__})


def _keyed_dropout(original: type, key: mx.array) -> type:
    state = [key]

    def __call__(self: nn.Dropout, x: mx.array) -> mx.array:
        state[0], own = mx.random.split(state[0])
        return (mx.random.bernoulli(self._p_1, x.shape, key=own) * x) * (1 / self._p_1)

    return type(original.__name__, (original,), {"__call__": __call__})
