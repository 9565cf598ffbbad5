"""Is a plan's way of computing right? Compared with the model's own on one real micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from stages.core.layers.guard import RelativeErrors, perturbed_adapters, relative
from stages.core.layers.staged import Boundary
from stages.core.memory.plan import Plan
from stages.core.memory.recovery import of_exception
from stages.core.update.batching import MicroBatch
from stages.core.update.loss import global_norm, plain_loss

if TYPE_CHECKING:
    from stages.core.update.step import Step

TOLERANCE = 1e-5
COARSE_TOLERANCE = 5e-2
"""Relative error of loss and gradient that a way of computing may have: float32, and all else."""

SWITCHES: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "recompute": ("recomputation", 0),
        "attention_block": ("attention in blocks", 0),
        "compiled": ("compilation", False),
    }
)
"""What `check` may switch off in a plan: its name for a person, and its value when off."""

OFF = {name: value for name, (_, value) in SWITCHES.items()}


def check(step: Step, micro: MicroBatch, boundary: Boundary | None = None) -> None:
    """Compare a step's way with the model's own on a real micro-batch, dropout off.

    What makes loss or gradient differ by more than rounding is switched off, each with a line in
    `step.notes`: the loss at targets where it is wrong by itself, then each switch that is wrong
    without the others, then all of them where those that are left are wrong together. The plain way
    makes all logits and keeps all activations, so choose a small micro-batch. Attention blocks and
    pieces of the loss are made so small that it has several of each.
    """
    wanted = step.plan
    try:
        right = _right(step, in_pieces(wanted, micro), micro, boundary)
    finally:
        step.plan = wanted
    step.plan = replace(wanted, **{name: OFF[name] for name in OFF if name not in right})


def _right(step: Step, tried: Plan, micro: MicroBatch, boundary: Boundary | None) -> set[str]:
    """Which of SWITCHES may stay as planned; a note for each other one."""
    step.plan = tried
    if not wrong(step, micro, boundary):
        return set(SWITCHES)
    on = [name for name, value in OFF.items() if getattr(tried, name) != value]
    step.plan = replace(tried, **OFF)
    if step.staged is not None and (found := wrong(step, micro, boundary)):
        step.notes.append(f"loss at targets is off: {found}")
        step.close()
    right = []
    for name in on:
        step.plan = replace(tried, **(OFF | {name: getattr(tried, name)}))
        if found := wrong(step, micro, boundary):
            step.notes.append(f"{SWITCHES[name][0]} is off: {found}")
        else:
            right.append(name)
    step.plan = replace(tried, **(OFF | {name: getattr(tried, name) for name in right}))
    if len(right) > 1 and (found := wrong(step, micro, boundary)):
        together = " with ".join(SWITCHES[name][0] for name in right)
        step.notes.append(f"{together} is off: {found}")
        return set()
    return set(right)


def in_pieces(plan: Plan, micro: MicroBatch) -> Plan:
    """The plan with blocks and pieces of which even a short micro-batch has several."""
    return replace(
        plan,
        attention_block=min(plan.attention_block, max(1, micro.tokens_BT.shape[1] // 3)),
        loss_chunk=min(plan.loss_chunk, max(1, micro.targets // 3)),
    )


def wrong(step: Step, micro: MicroBatch, boundary: Boundary | None = None) -> str:
    """What is wrong with the way in force on this micro-batch, "" where nothing is."""
    step.forget_trace()
    try:
        errors = _errors(step, micro, boundary)
    except Exception as error:
        if of_exception(error) is not None:
            raise  # says nothing about the way in force
        # Whatever an architecture's code raises, where the whole model does not.
        return (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        step.forget_trace()  # it is without dropout, and holds weights that may be freed later
    if all(error <= tolerance(step.model) for error in errors):  # not so for NaN
        return ""
    loss, gradient = errors
    return f"on a real micro-batch loss is off by {loss:.1e}, gradient by {gradient:.1e}"


def _errors(step: Step, micro: MicroBatch, boundary: Boundary | None) -> RelativeErrors:
    tokens_BT, mask_BT = mx.array(micro.tokens_BT), mx.array(micro.mask_BT)

    def plain() -> mx.array:
        return plain_loss(step.model(tokens_BT), tokens_BT, mask_BT, micro.targets)

    step.without_dropout()
    with perturbed_adapters(step.model):
        loss, gradient = step.evaluated(micro, micro.targets, None, boundary)
        expected_loss, expected = nn.value_and_grad(step.model, plain)()
        mx.eval(expected_loss, expected)
    difference = tree_map(lambda a, b: a - b.astype(mx.float32), gradient, expected)
    wanted = expected_loss.item()
    return RelativeErrors(
        relative(abs(loss - wanted), abs(wanted)),
        relative(global_norm(difference), global_norm(expected)),
    )


def tolerance(model: nn.Module) -> float:
    """How far apart loss and gradient may be, by the types of the model's weights."""
    floating = [x for _, x in tree_flatten(model.parameters()) if x.dtype != mx.uint32]
    return TOLERANCE if all(x.dtype == mx.float32 for x in floating) else COARSE_TOLERANCE
