"""Optimizers by mlx-lm's names and configs, and one update: clip, check, apply."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from stages.core.config import schema
from stages.core.config.settings import nearest
from stages.core.errors import UserError
from stages.core.update.loss import global_norm
from stages.core.update.step import Gradient

CLASSES: Mapping[str, type[optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "muon": optim.Muon,
    "adafactor": optim.Adafactor,
}

MOST_COMPILED_BYTES = 256e6
"""Trained arrays up to this size are updated by one compiled function."""


def build(train: schema.Train, model: nn.Module) -> optim.Optimizer:
    """The optimizer of the run, its state made for the model's trained arrays.

    Raises:
        UserError: `optimizer_config` names no optimizer, or a value or key it does not take.
    """
    where = "train.optimizer_config"
    for name in train.optimizer_config:
        if name not in CLASSES:
            expected, close = ", ".join(CLASSES), nearest(name, list(CLASSES))
            raise UserError(
                "train.optimizer_config names no optimizer",
                where=where,
                found=name,
                expected=f"{{{train.optimizer}: {{…}}}}, of {expected}",
                fix=f"nearest: {close}" if close else "",
            )
    kind = CLASSES[train.optimizer]
    config = dict(train.optimizer_config.get(train.optimizer) or {})
    known = [name for name in inspect.signature(kind).parameters if name != "learning_rate"]
    unknown = [key for key in config if key not in known]
    if unknown:
        raise UserError(
            f"{train.optimizer} has no such setting",
            where=f"{where}.{train.optimizer}",
            found=", ".join(unknown),
            expected=", ".join(known),
        )
    try:
        optimizer = kind(learning_rate=train.learning_rate, **config)
        optimizer.init(model.trainable_parameters())
    except (TypeError, ValueError) as error:
        where = f"{where}.{train.optimizer}"
        raise UserError(
            f"{train.optimizer} refuses its settings", where=where, found=error
        ) from error
    mx.eval(optimizer.state)
    return optimizer


def ignores_rate(train: schema.Train) -> bool:
    """Whether the optimizer sets its own rate: mlx-lm's adafactor does unless told otherwise."""
    config = train.optimizer_config.get("adafactor") or {}
    return train.optimizer == "adafactor" and config.get("relative_step", True)


def clipped(gradient: Gradient, clip_norm: float | None) -> tuple[Gradient, float]:
    """The gradient scaled to a global norm of at most `clip_norm`, and its norm before that.

    As in `mlx.optimizers.clip_grad_norm`: scaled by min(1, clip_norm / (norm + 1e-6)).
    """
    norm = global_norm(gradient)
    scale = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
    return gradient if scale == 1.0 else tree_map(lambda g: g * scale, gradient), norm


def apply(model: nn.Module, optimizer: optim.Optimizer, gradient: Gradient, rate: float) -> bool:
    """Take one optimizer step, computed when this returns.

    Returns:
        Whether all trained arrays are finite afterwards.
    """
    optimizer.learning_rate = rate
    if not _compiles(model):
        optimizer.update(model, _as_trained(gradient, model.trainable_parameters()))
        mx.eval(model.trainable_parameters(), optimizer.state)
        return bool(finite(model.trainable_parameters()).item())
    stepped = _steps.get(optimizer)
    if stepped is None:
        stepped = _steps[optimizer] = mx.compile(functools.partial(_step, weakref.ref(optimizer)))
    parameters, state, sound = stepped(model.trainable_parameters(), optimizer.state, gradient)
    model.update(parameters)
    optimizer.state = state
    mx.eval(parameters, state, sound)
    return bool(sound.item())


_steps: weakref.WeakKeyDictionary[optim.Optimizer, Callable] = weakref.WeakKeyDictionary()
"""The compiled step of each optimizer."""


def _compiles(model: nn.Module) -> bool:
    """Whether a step is compiled: on a GPU, where hundreds of small arrays cost their starts.

    Not for large ones, whose old values would stay until the new ones are all there.
    """
    arrays = tree_flatten(model.trainable_parameters())
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and sum(x.nbytes for _, x in arrays) <= MOST_COMPILED_BYTES


def _step(
    reference: weakref.ref[optim.Optimizer], parameters: Any, state: Any, gradient: Gradient
) -> tuple[Any, Any, mx.array]:
    """(new parameters, new state, whether they are finite); pure, so that it can be compiled."""
    optimizer = reference()
    kept, optimizer.state = optimizer.state, state
    try:
        new = optimizer.apply_gradients(_as_trained(gradient, parameters), parameters)
        return new, optimizer.state, finite(new)
    finally:
        optimizer.state = kept


def _as_trained(gradient: Gradient, parameters: Any) -> Gradient:
    """In the parameter's own type, as mlx-lm's gradients are: float32 would widen bfloat16."""
    return tree_map(lambda g, p: g.astype(p.dtype), gradient, parameters)


def finite(tree: Any) -> mx.array:
    """Whether a tree holds no NaN and no infinity: one bool."""
    checks = [mx.isfinite(x).all() for _, x in tree_flatten(tree)]
    return mx.all(mx.stack(checks)) if checks else mx.array(True)


def flat_state(optimizer: optim.Optimizer) -> dict[str, mx.array]:
    """The optimizer's whole state by name: moments, step, rate."""
    return dict(tree_flatten(optimizer.state))


def restore(optimizer: optim.Optimizer, state: Mapping[str, mx.array]) -> None:
    """Put a state from `flat_state` back; before anything is compiled over `optimizer.state`."""
    optimizer.state = tree_unflatten(list(state.items()))
    mx.eval(optimizer.state)
