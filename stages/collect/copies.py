"""Equal rows: repeats inside a split, leaks between splits, and cuts that keep them together.

Rows are compared by a 128-bit digest of their normalized record, 16 bytes a row.
"""

from __future__ import annotations

import numpy as np

from stages.core.tables import SPLITS


def first_equals(digests: np.ndarray) -> np.ndarray:
    """For each row the first row that equals it.

    Args:
        digests: uint64 (N, 2).

    Returns:
        int64 (N,): index of the first equal row; the row's own index where it is the first.
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    new = np.ones(len(order), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(new)
    first = np.empty(len(order), np.int64)
    first[order] = np.repeat(order[starts], np.diff(np.append(starts, len(order))))
    return first


def repeats(digests: np.ndarray) -> np.ndarray:
    """Every row that equals an earlier one, with the first such row: int64 (pairs, 2)."""
    first = first_equals(digests)
    rows = np.flatnonzero(first != np.arange(len(first)))
    return np.stack([rows, first[rows]], axis=1)


def leaks(train: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Every row of `other` that train holds, with train's first such row: int64 (pairs, 2)."""
    first = first_equals(np.concatenate([train, other]))[len(train) :]
    rows = np.flatnonzero(first < len(train))
    return np.stack([rows, first[rows]], axis=1)


def cut(digests: np.ndarray, shares: dict[str, float], seed: int) -> np.ndarray:
    """Give each row a split by its content, so that equal rows stay together.

    Distinct rows are ordered by a hash of (seed, content); the first ones fill `test`, the next
    `valid`, the rest is `train`. A split with a share gets at least one row while there are
    distinct rows for all. Adding or removing rows moves only rows at the borders.

    Args:
        digests: uint64 (N, 2).
        shares: Share of each split to be cut off train (0 for none).
        seed: `data.seed`.

    Returns:
        int8 (N,): index into `SPLITS`.
    """
    first = first_equals(digests)
    firsts, sizes = np.unique(first, return_counts=True)
    order = np.argsort(_shuffled(digests[firsts], seed), kind="stable")
    split_of = np.zeros(len(digests), np.int8)
    at, left = 0, len(firsts) - 1
    for name in ("test", "valid"):
        wanted = round(shares.get(name, 0) * len(digests))
        if shares.get(name, 0) > 0 and wanted == 0:
            wanted = 1
        taken = 0
        while taken < wanted and left > 0:
            split_of[firsts[order[at]]] = SPLITS.index(name)
            taken += sizes[order[at]]
            at, left = at + 1, left - 1
    return split_of[first]


def _shuffled(digests: np.ndarray, seed: int) -> np.ndarray:
    """uint64 (N,): a number for each digest that the seed mixes anew (SplitMix64's finish)."""
    salt = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    x = (digests[:, 0] ^ salt) + digests[:, 1]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
