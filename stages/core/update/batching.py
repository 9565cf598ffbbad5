"""Which examples make an update, and how an update is cut into micro-batches.

The order of the examples comes from (seed, epoch) alone, so it is the mathematics. The cut into
micro-batches follows the plan and changes speed and memory only: the loss of each part is divided
by the targets of the whole update. Plain NumPy: nothing here needs MLX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.core.memory.plan import Plan
from stages.core.tables import Examples

MOST_WIDTHS = 8
WIDTH_STEP = 16
"""Padded lengths are multiples of this, but never above the cap."""


@dataclass(frozen=True)
class MicroBatch:
    """Examples that are on the device at once, padded on the right to one width.

    Attributes:
        ids: int64 (b,), the examples of the first b rows; more rows are empty.
        tokens_BT: int32; padding is token 0, which no earlier position sees.
        mask_BT: bool; element (b, t): tokens_BT[b, t] is a target. Never true at t = 0.
        targets: How many elements of `mask_BT` are true.
        tokens: Tokens without padding.
    """

    ids: np.ndarray
    tokens_BT: np.ndarray
    mask_BT: np.ndarray
    targets: int
    tokens: int


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation int64 (n,) of `n` examples for one epoch, from (seed, epoch) alone.

    Sorts raw PCG64 numbers: NumPy promises that these never change, and does not promise it for
    its own `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(keys, kind="stable")


def updates_per_epoch(n: int, batch: int) -> int:
    """Updates of one pass over `n` examples; the last, short effective batch is one of them."""
    return math.ceil(n / batch)


def updates_in_run(n: int, batch: int, epochs: float | None, updates: int | None) -> int:
    """Updates of the whole run, from `train.epochs` or `train.updates` (the other is None).

    A part of an epoch is rounded up to whole updates.
    """
    if updates is not None:
        return updates
    return max(1, math.ceil(round(epochs * updates_per_epoch(n, batch), 6)))


def effective_batches(n: int, batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The example ids of each update of one epoch, in order; the last may be short."""
    ids = order(n, seed, epoch)
    return [ids[start : start + batch] for start in range(0, n, batch)]


def widths(lengths: np.ndarray, cap: int, most: int = MOST_WIDTHS) -> tuple[int, ...]:
    """At most `most` padded lengths, ascending, that pad these examples the least.

    Exact by dynamic programming: a width serves all lengths above the next smaller width.

    Args:
        lengths: Tokens of each example, (N,), N at least 1.
        cap: No width is above it, unless an example is.
    """
    step = WIDTH_STEP if lengths.max() > WIDTH_STEP else 1
    rounded = np.minimum(-(-lengths // step) * step, max(cap, lengths.max()))
    choices, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    cost = np.where(np.arange(len(below)) == 0, 0.0, np.inf)
    steps = []
    for _ in range(min(most, len(choices))):
        through = cost[None, :] + choices[:, None] * (below[1:, None] - below[None, :])
        through[below[None, :] >= below[1:, None]] = np.inf
        steps.append(through.argmin(axis=1))
        cost = np.concatenate([[np.inf], through.min(axis=1)])
    chosen, end = [], len(choices)
    for previous in reversed(steps):
        chosen.append(int(choices[end - 1]))
        end = int(previous[end - 1])
    return tuple(reversed(chosen))


def width_for(length: int, plan: Plan) -> int:
    """The padded width of a micro-batch whose longest example has `length` tokens."""
    return next((width for width in plan.widths if width >= length), length)


def most_rows(width: int, plan: Plan) -> int:
    """Most rows of a micro-batch of this width: `batch_size`, or what `batch_tokens` allows."""
    return max(1, min(plan.batch_size, plan.batch_tokens // width))


def few(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 …: room for `count` out of few sizes."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def rows_of(count: int, width: int, plan: Plan) -> int:
    """Rows that a micro-batch of `count` examples has; few sizes where shapes are compiled."""
    return min(few(count), max(count, most_rows(width, plan))) if plan.compiled else count


def groups(lengths: np.ndarray, ids: np.ndarray, plan: Plan) -> list[np.ndarray]:
    """Cut examples into micro-batches: the ids of each, shortest examples first.

    Ordered by length (equal ones by id) and cut where the sum of padded tokens, plus
    `plan.start_tokens` for each part, is least.

    Args:
        lengths: Tokens of every example of the split, (N,).
        ids: The examples to cut, in any order.
    """
    ids = np.sort(np.asarray(ids, dtype=np.int64))
    ids = ids[np.argsort(lengths[ids], kind="stable")]
    cost, start = [0], [0]
    for end, length in enumerate(lengths[ids].tolist(), start=1):
        width = width_for(length, plan)
        rows = most_rows(width, plan)
        best = math.inf
        for count in range(min(rows, end), 0, -1):
            padded = width * rows_of(count, width, plan)
            candidate = cost[end - count] + padded + plan.start_tokens
            if candidate < best:
                best, first = candidate, end - count
        cost.append(best)
        start.append(first)
    return _parts(ids, start)


def _parts(ids: np.ndarray, start: Sequence[int]) -> list[np.ndarray]:
    """Follow the best starts back from the end."""
    parts, end = [], len(ids)
    while end:
        parts.append(ids[start[end] : end])
        end = start[end]
    return parts[::-1]


def micro_batch(examples: Examples, ids: np.ndarray, plan: Plan) -> MicroBatch:
    """Pad these examples to one array; a compiled plan has few numbers of rows (`rows_of`)."""
    width = width_for(int(examples.lengths[ids].max()), plan)
    rows = rows_of(len(ids), width, plan)
    tokens_BT = np.zeros((rows, width), np.int32)
    mask_BT = np.zeros((rows, width), bool)
    for row, i in enumerate(ids):
        tokens, mask = examples.example(i)
        tokens_BT[row, : len(tokens)] = tokens
        mask_BT[row, : len(mask)] = mask
    mask_BT[:, 0] = False
    return MicroBatch(
        ids=np.asarray(ids, dtype=np.int64),
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        targets=int(np.count_nonzero(mask_BT)),
        tokens=int(examples.lengths[ids].sum()),
    )


def micro_batches(examples: Examples, ids: np.ndarray, plan: Plan) -> list[MicroBatch]:
    """The micro-batches of these examples under a plan; see `groups`."""
    return [micro_batch(examples, part, plan) for part in groups(examples.lengths, ids, plan)]


def nearest(lengths: np.ndarray, targets: np.ndarray, tokens: int) -> int:
    """The example with targets whose length is nearest to `tokens`, the first of several."""
    return int((np.abs(lengths - tokens) + (targets == 0) * 1e9).argmin())
