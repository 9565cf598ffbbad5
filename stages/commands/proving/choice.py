"""A few of the user's own examples for the proof, some short, one at the cap, cut to a bound."""

from __future__ import annotations

import numpy as np

from stages.core.errors import UserError
from stages.core.tables import Examples

PADDED_TOKENS = 2048
LOGIT_BYTES = 200e6
"""Bounds of one whole batch, padded: time on two CPU cores, and float32 logits in memory."""
SHORTEST_CAP = 48


def cap(rows: int, vocabulary: int) -> int:
    """The longest that an example of a whole batch of `rows` may be, in tokens."""
    tokens = min(PADDED_TOKENS, LOGIT_BYTES / (4 * vocabulary))
    return max(SHORTEST_CAP, int(tokens / rows))


def lengths(count: int, rows: int, longest: int) -> np.ndarray:
    """Wanted lengths int64 (count,): every `rows` of them double three times up to `longest`."""
    spread = np.geomspace(longest / 8, longest, rows) if rows > 1 else np.array([longest])
    return np.resize(np.round(spread).astype(np.int64), count)


def choose(examples: Examples, wanted: np.ndarray) -> Examples:
    """For each wanted length the shortest unused example that has it, cut to it.

    Where there is none left, the longest unused one serves; where all are used, they serve again.
    The first tokens are kept, or those around the first target where it lies behind them.

    Args:
        examples: Of the training split.
        wanted: Lengths, (n,), at least 2 each.

    Raises:
        UserError: No example has a target.
    """
    with_targets = np.flatnonzero(examples.targets)
    if not with_targets.size:
        raise UserError(
            "No example has a target, so there is nothing to prove",
            where="data/examples/train.parquet",
            fix="see reports/split.json; `tokenize.train_on` decides what is a target",
        )
    by_length = with_targets[np.argsort(examples.lengths[with_targets], kind="stable")]
    unused: list[int] = []
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    rows: list[int] = []
    chosen = {}
    for place in np.argsort(-wanted, kind="stable").tolist():
        unused = unused or by_length.tolist()
        fits = np.searchsorted(examples.lengths[unused], wanted[place])
        chosen[place] = unused.pop(min(int(fits), len(unused) - 1))
    for place, length in enumerate(wanted.tolist()):
        parts.append(_window(*examples.example(chosen[place]), length))
        rows.append(int(examples.row[chosen[place]]))
    return _joined(parts, rows)


def _window(tokens: np.ndarray, mask: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `length` tokens in a row with a target behind the first of them."""
    first = int(np.flatnonzero(mask[1:])[0]) + 1
    start = 0 if first < length else first - length // 2
    span = slice(start, start + length)
    return tokens[span], mask[span]


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], rows: list[int]) -> Examples:
    sizes = [len(tokens) for tokens, _ in parts]
    empty = np.zeros(0)
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        tokens=np.concatenate([empty, *(tokens for tokens, _ in parts)]).astype(np.int32),
        target_mask=np.concatenate([empty, *(mask for _, mask in parts)]).astype(bool),
        row=np.array(rows, np.int64),
        piece=np.zeros(len(parts), np.int32),
    )
