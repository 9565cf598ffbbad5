"""Check a memory setting on a real micro-batch before it is used.

A setting may change speed and memory, never the step. So loss and whole gradient of the way it
computes are compared with the model's own. In float32 expect a difference of 0 for a cut, at most
1e-5 for the loss at targets; the caller decides and switches the setting off where it is more.
The gradient must be compared too: a wrong one can come with the right loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from stages.core.layers.staged import StagedModel, swapped_parameters
from stages.core.update.loss import count_targets, gathered_loss, plain_loss, target_positions

LossFunction = Callable[[], mx.array]
"""The loss of the fixed micro-batch, from the model's parameters as they are."""


class RelativeErrors(NamedTuple):
    """How far a way of computing is from the plain one."""

    loss: float
    """|a - b| / |b| of the losses."""
    gradient: float
    """|a - b| / |b| of the gradients, Euclidean norm over all trained arrays together."""


def check_cut(
    staged: StagedModel, tokens_BT: np.ndarray, mask_BT: np.ndarray, cut: int
) -> RelativeErrors:
    """Errors of the model run from the boundary below `cut` against the whole model.

    tokens_BT: int32; mask_BT: bool, at least one target. Choose rows longer than the model's
    sliding window, if any. Raises UnsupportedModel where the model can't be cut there.
    """
    tokens, mask, targets = mx.array(tokens_BT), mx.array(mask_BT), count_targets(mask_BT)
    boundary = staged.frozen(tokens, cut)
    mx.eval(boundary)

    def split() -> mx.array:
        return plain_loss(staged.logits(tokens, boundary, cut), tokens, mask, targets)

    def whole() -> mx.array:
        return plain_loss(staged.model(tokens), tokens, mask, targets)

    return compare(staged.model, split, whole)


def check_loss(
    staged: StagedModel, tokens_BT: np.ndarray, mask_BT: np.ndarray, chunk: int | None
) -> RelativeErrors:
    """Errors of the loss at targets, in chunks, against the loss over the model's own logits.

    tokens_BT: int32; mask_BT: bool, at least one target. Raises UnsupportedModel where the head
    can't be run alone.
    """
    tokens, mask, targets = mx.array(tokens_BT), mx.array(mask_BT), count_targets(mask_BT)
    gathered = [mx.array(x) for x in target_positions(tokens_BT, mask_BT, targets)]

    def at_targets() -> mx.array:
        hidden = staged.hidden(tokens)
        return gathered_loss(
            staged.head,
            hidden,
            *gathered,
            divisor=targets,
            chunk=chunk,
            head_parameters=staged.head_parameters(),
        )

    def whole() -> mx.array:
        return plain_loss(staged.model(tokens), tokens, mask, targets)

    return compare(staged.model, at_targets, whole)


def compare(model: nn.Module, way: LossFunction, plain: LossFunction) -> RelativeErrors:
    """Errors of loss and whole gradient of `way` against `plain`, for any setting.

    For the comparison dropout is off and every lora_b, which starts at zero and would hide the
    gradient of lora_a, is set to small numbers; both are put back.
    """
    training = model.training
    model.eval()
    try:
        with perturbed_adapters(model):
            loss_a, gradient_a = nn.value_and_grad(model, way)()
            mx.eval(loss_a, gradient_a)
            loss_b, gradient_b = nn.value_and_grad(model, plain)()
            mx.eval(loss_b, gradient_b)
    finally:
        model.train(training)
    a, b = (dict(tree_flatten(gradient)) for gradient in (gradient_a, gradient_b))
    return RelativeErrors(
        relative(abs(loss_a.item() - loss_b.item()), abs(loss_b.item())),
        relative(_norm([a[name] - b[name] for name in b]), _norm(list(b.values()))),
    )


def relative(difference: float, reference: float) -> float:
    """`difference / reference`; where the reference is 0, the difference itself."""
    return difference / reference if reference else difference


@contextmanager
def perturbed_adapters(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Set every trained lora_b to normal noise of 0.01; draws nothing from mx.random."""
    noise = np.random.default_rng(seed)
    values = {
        name: mx.array(noise.normal(0, 0.01, value.shape), value.dtype)
        for name, value in tree_flatten(model.trainable_parameters())
        if name.rsplit(".", 1)[-1] == "lora_b"
    }
    with swapped_parameters(model, values):
        yield


def _norm(arrays: list[mx.array]) -> float:
    return sum(mx.square(x.astype(mx.float32)).sum().item() for x in arrays) ** 0.5
