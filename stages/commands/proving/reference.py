"""Gradient of one whole batch by other roads than ours: over all logits, and by mlx-lm's loss.

mlx-lm's `default_loss` takes, per row, a first and a last index of targets, `lengths`, but compares
with `<=` against the row's length: the first padding token of every padded row counts as a target
too. Given the index of the last target in its place (length - 1), it counts the row's own targets
and no more. It knows one range of targets per row; a row with several (a chat of several turns)
stands in the batch once for each. Its result, a mean over all targets of the batch, is then the
loss of an update whose divisor is the number of its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.tuner.trainer import default_loss

from stages.core.tables import Examples
from stages.core.update.loss import plain_loss
from stages.core.update.step import Gradient

Reference = tuple[float, Gradient]
"""Loss per target, and its gradient."""


class Whole(NamedTuple):
    """Examples as one batch: tokens int32 (B, T), and which of them are targets, bool (B, T)."""

    tokens_BT: np.ndarray
    mask_BT: np.ndarray


def whole(examples: Examples, rows: int, wider: int = 0) -> Whole:
    """The first `rows` examples, padded to the longest of them and `wider` more.

    Made here and not by stages.core.update.batching, whose work is what is proved.
    """
    chosen = [examples.example(i) for i in range(rows)]
    width = max(len(tokens) for tokens, _ in chosen) + wider
    tokens_BT, mask_BT = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    for row, (tokens, mask) in enumerate(chosen):
        tokens_BT[row, : len(tokens)] = tokens
        mask_BT[row, 1 : len(mask)] = mask[1:]
    return Whole(tokens_BT, mask_BT)


def plain(model: nn.Module, batch: Whole) -> Reference:
    """By the loss as it is defined, over all logits of the model as it is."""
    tokens_BT, mask_BT = map(mx.array, batch)
    divisor = int(batch.mask_BT.sum())
    return _evaluated(model, lambda: plain_loss(model(tokens_BT), tokens_BT, mask_BT, divisor))


def by_mlx_lm(model: nn.Module, batch: Whole) -> Reference:
    """By mlx-lm's own loss without its padding target.

    The logits are handed to it in float32: it takes the cross entropy in the type of the logits,
    whose rounding is not what is compared here.
    """
    row, first, last = target_ranges(batch.mask_BT)
    tokens_BT = mx.array(batch.tokens_BT[row])
    lengths = mx.array(np.stack([first, last], axis=1))

    def loss() -> mx.array:
        wide = lambda inputs: model(inputs).astype(mx.float32)
        return default_loss(wide, tokens_BT, lengths)[0]

    return _evaluated(model, loss)


def target_ranges(mask_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, first and last index of each unbroken range of targets, int64 (R,) each."""
    edges = np.diff(np.pad(mask_BT.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, first = np.nonzero(edges == 1)
    _, end = np.nonzero(edges == -1)
    return row, first, end - 1


def _evaluated(model: nn.Module, loss: Callable[[], mx.array]) -> Reference:
    model.train()
    value, gradient = nn.value_and_grad(model, loss)()
    mx.eval(value, gradient)
    return value.item(), gradient
