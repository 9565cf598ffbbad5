"""The loss that is trained and reported, and ways to compute it at the targets alone.

A target is a token whose loss counts; the target at position i is predicted from position i-1.
For logits z at i-1 and label y = tokens[i], its loss is the cross entropy in nats,

    ce = logsumexp(z) - z[y]                                            (float32)

and the loss of a micro-batch is

    loss = sum of ce over the micro-batch's targets / divisor

with the divisor the number of targets of the whole update, all micro-batches and workers
together, known on the host before the first micro-batch. So the gradients of micro-batches add up
to the gradient of the whole update, however it is cut.

`plain_loss` states this over all logits. `gathered_loss` gives the same number and gradient
without logits of B x T x V: it gathers hidden states at the targets and takes head and cross
entropy chunk by chunk, making the gradient for the hidden states in the same pass. Peak memory is
about 12 chunks of C x V float32 on the CPU.

Shapes: B rows, T tokens, D hidden size, V vocabulary, N gathered positions, C of them in a chunk.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from stages.core.layers.exponentials import logsumexp
from stages.core.layers.staged import NO_PARAMETERS

HeadFunction = Callable[[mx.array, Mapping[str, mx.array]], mx.array]
"""(hidden (..., C, D), trained parameters of the head by name) -> logits (C, V)."""


def count_targets(mask_BT: np.ndarray) -> int:
    """Number of targets of a batch; an update's divisor is the sum over its micro-batches."""
    return int(np.count_nonzero(mask_BT))


def target_positions(
    tokens_BT: np.ndarray, mask_BT: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where to predict the targets of a batch, padded to `length` entries.

    tokens_BT: int32. mask_BT: bool, true where the token is a target.
    Returns positions_N (int32, b*T + i-1), labels_N (int32) and weights_N (float32: 1 for a
    target, 0 for padding, which repeats the last target), N = length.
    Raises ValueError for more targets than `length`, and for a target at token 0 of a row.
    """
    rows = np.flatnonzero(mask_BT[:, 0])
    if rows.size:
        raise ValueError(f"row {rows[0]}: token 0 is a target, but nothing comes before it")
    row, column = np.nonzero(mask_BT)
    if row.size > length:
        raise ValueError(f"{row.size} targets, but room for {length}")
    positions = row * mask_BT.shape[1] + column - 1
    labels = tokens_BT[row, column]
    weights = np.ones(row.size, np.float32)
    padding = (0, length - row.size)
    mode = "edge" if row.size else "constant"
    return (
        np.pad(positions.astype(np.int32), padding, mode=mode),
        np.pad(labels.astype(np.int32), padding, mode=mode),
        np.pad(weights, padding),
    )


def cross_entropy(logits_NV: mx.array, labels_N: mx.array) -> mx.array:
    """Cross entropy per position, (N,), in nats and float32, for logits of any floating dtype."""
    logits_NV = logits_NV.astype(mx.float32)
    picked_N = mx.take_along_axis(logits_NV, labels_N[..., None], axis=-1).squeeze(-1)
    return logsumexp(logits_NV) - picked_N


def plain_loss(
    logits_BTV: mx.array, tokens_BT: mx.array, mask_BT: mx.array, divisor: float | mx.array
) -> mx.array:
    """The loss of a micro-batch from all its logits: the reference for every other way."""
    losses = cross_entropy(logits_BTV[:, :-1], tokens_BT[:, 1:])
    return (losses * mask_BT[:, 1:]).sum() / divisor


def gather_positions(hidden_BTD: mx.array, positions_N: mx.array) -> mx.array:
    """Hidden states at flattened positions: (..., B, T, D) and (N,) to (..., N, D)."""
    return mx.take(mx.flatten(hidden_BTD, -3, -2), positions_N, axis=-2)


def gathered_loss(
    head: HeadFunction,
    hidden_BTD: mx.array,
    positions_N: mx.array,
    labels_N: mx.array,
    weights_N: mx.array,
    *,
    divisor: float | mx.array,
    chunk: int | None,
    head_parameters: Mapping[str, mx.array] = NO_PARAMETERS,
) -> mx.array:
    """The loss of a micro-batch from hidden states before the final norm; differentiable.

    positions_N, labels_N, weights_N: from `target_positions`. divisor: an array under
        `mx.compile`, where a number would be compiled in.
    chunk: positions per piece; None for one piece.
    head_parameters: `StagedModel.head_parameters()`; their gradients are made in the same pass,
        summed over chunks in float32.

    Each chunk gives its loss and its gradients at once, from inputs cut off from the graph; then
    `value + (s - stop_gradient(s))` with s the inner product of inputs and gradients has exactly
    the loss as value and those gradients as gradient.
    """
    hidden_ND = gather_positions(hidden_BTD, positions_N)
    value_and_gradient = mx.value_and_grad(_weighted_loss(head), argnums=[0, 1])
    cut_off = {name: mx.stop_gradient(value) for name, value in head_parameters.items()}
    total, summed, pieces = mx.array(0.0), {}, []
    for part in _chunks(positions_N.size, chunk):
        hidden_CD = mx.stop_gradient(hidden_ND[..., part, :])
        # Without this, chunks are computed ahead and the logits of all of them live at once.
        (hidden_CD,) = mx.depends([hidden_CD], [*pieces[-1:], total, *summed.values()])
        loss, (piece, others) = value_and_gradient(
            hidden_CD, cut_off, labels_N[part], weights_N[part], divisor
        )
        total = total + loss
        pieces.append(piece)
        summed = {k: summed.get(k, 0.0) + g.astype(mx.float32) for k, g in others.items()}
    slope = _inner(hidden_ND, mx.concatenate(pieces, axis=-2))
    slope = sum((_inner(head_parameters[k], g) for k, g in summed.items()), slope)
    return mx.stop_gradient(total) + (slope - mx.stop_gradient(slope))


def target_losses(
    head: HeadFunction,
    hidden_BTD: mx.array,
    positions_N: mx.array,
    labels_N: mx.array,
    chunk: int | None,
) -> tuple[mx.array, mx.array]:
    """Per position: its loss (N,), nats in float32, and whether the likeliest token is the label.

    For evaluation: no gradient, no weights; padded entries are the caller's to leave out.
    """
    hidden_ND = gather_positions(mx.stop_gradient(hidden_BTD), positions_N)
    losses, correct = [], []
    for part in _chunks(positions_N.size, chunk):
        (hidden_CD,) = mx.depends([hidden_ND[..., part, :]], [*losses[-1:], *correct[-1:]])
        logits_CV = head(hidden_CD, NO_PARAMETERS)
        losses.append(cross_entropy(logits_CV, labels_N[part]))
        correct.append(mx.argmax(logits_CV, axis=-1) == labels_N[part])
    return mx.concatenate(losses), mx.concatenate(correct)


def global_norm(gradient: dict[str, Any]) -> float:
    """The Euclidean norm over all arrays together, in float32."""
    squares = [mx.square(x.astype(mx.float32)).sum() for _, x in tree_flatten(gradient)]
    return mx.sqrt(mx.sum(mx.stack(squares))).item()


def _weighted_loss(head: HeadFunction) -> Callable[..., mx.array]:
    def weighted_loss(
        hidden_CD: mx.array,
        parameters: Mapping[str, mx.array],
        labels_C: mx.array,
        weights_C: mx.array,
        divisor: float | mx.array,
    ) -> mx.array:
        losses_C = cross_entropy(head(hidden_CD, parameters), labels_C)
        return (losses_C * weights_C).sum() / divisor

    return weighted_loss


def _chunks(length: int, chunk: int | None) -> Iterator[slice]:
    step = length if chunk is None else chunk
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _inner(values: mx.array, gradient: mx.array) -> mx.array:
    return (values.astype(mx.float32) * mx.stop_gradient(gradient.astype(mx.float32))).sum()
