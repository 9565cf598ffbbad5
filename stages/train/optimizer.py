"""Optimizers by mlx-lm's names and configs, and one update: clip, check, apply."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from stages.core.config import schema
from stages.core.config.settings import nearest
from stages.core.errors import UserError
from stages.core.update.step import Gradient, global_norm

CLASSES: Mapping[str, type[optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": optim.SGD,
    "muon": optim.Muon,
    "adafactor": optim.Adafactor,
}


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
    parameters = model.trainable_parameters()
    # In the parameter's own type, as mlx-lm's gradients are: a float32 one would widen bfloat16.
    gradient = tree_map(lambda g, p: g.astype(p.dtype), gradient, parameters)
    optimizer.learning_rate = rate
    optimizer.update(model, gradient)
    mx.eval(model.trainable_parameters(), optimizer.state)
    return finite(model.trainable_parameters())


def finite(tree: Any) -> bool:
    """Whether a tree holds no NaN and no infinity."""
    checks = [mx.isfinite(x).all() for _, x in tree_flatten(tree)]
    return bool(mx.all(mx.stack(checks)).item()) if checks else True


def flat_state(optimizer: optim.Optimizer) -> dict[str, mx.array]:
    """The optimizer's whole state by name: moments, step, rate."""
    return dict(tree_flatten(optimizer.state))


def restore(optimizer: optim.Optimizer, state: Mapping[str, mx.array]) -> None:
    """Put a state from `flat_state` back; before anything is compiled over `optimizer.state`."""
    optimizer.state = tree_unflatten(list(state.items()))
    mx.eval(optimizer.state)
