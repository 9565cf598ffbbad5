"""How sure the change is: a paired bootstrap over rows.

Rows are what was sampled from the world, so rows are what is drawn again, each with both its
losses (pairing takes out what makes a row hard for both models). The statistic is the one that is
reported: the mean over targets, so a row weighs as much as it has targets.

    change = (sum of tuned losses - sum of base losses) / sum of targets

The interval holds the middle 95% of the changes of the resamples (Efron's percentile interval,
Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). The seed is fixed, so
the same losses always give the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SEED = 0
LEVEL = 0.95
RESAMPLES = 10_000
FEWEST_RESAMPLES = 1_000
MOST_DRAWS = 1_000_000_000
"""Rows drawn in all: a million test rows get the fewest resamples, which takes about 15 s."""
DRAWS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Change:
    """Tuned minus base, in nats per target; below zero is better."""

    change: float
    low: float
    high: float
    resamples: int


def bootstrap(base: np.ndarray, tuned: np.ndarray, targets: np.ndarray, seed: int = SEED) -> Change:
    """The change of the mean loss and its 95% interval.

    Args:
        base, tuned: float64 (N,): sum of the losses of each row's targets, in nats.
        targets: int64 (N,): targets of each row, at least 1.
        seed: Decides the resamples.

    Raises:
        ValueError: There are no rows.
    """
    if len(targets) == 0:
        raise ValueError("an interval needs at least one row")
    differences = tuned.astype(np.float64) - base
    changes = _resampled(differences, targets, resamples_of(len(targets)), seed)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(changes, [tail, 1 - tail])
    return Change(
        change=float(differences.sum() / targets.sum()),
        low=float(low),
        high=float(high),
        resamples=len(changes),
    )


def resamples_of(rows: int) -> int:
    """How many resamples are drawn for a test set of this many rows."""
    return max(FEWEST_RESAMPLES, min(RESAMPLES, MOST_DRAWS // rows))


def _resampled(
    differences: np.ndarray, targets: np.ndarray, resamples: int, seed: int
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = len(targets)
    at_once = max(1, DRAWS_AT_ONCE // rows)
    parts = []
    for start in range(0, resamples, at_once):
        drawn = rng.integers(rows, size=(min(at_once, resamples - start), rows), dtype=np.int32)
        parts.append(differences[drawn].sum(axis=1) / targets[drawn].sum(axis=1))
    return np.concatenate(parts)
