"""Shapes of micro-batches, and sums of c, a·B·T and b·B·T·S fitted to readings.

B rows, T tokens, and S keys in one of three senses: `all_keys` T; `block_keys` and `causal_keys`
what makes T·S the scores of the largest block of attention in blocks, under any mask or under a
causal one, where a block sees no keys behind its last query. Coefficients are never negative.
Shapes may hold arrays: then results are arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stages.core.memory.points import Point, Reading

Number = float | np.ndarray


class Shape(NamedTuple):
    """Rows, padded width and targets of a micro-batch, or of many (arrays)."""

    rows: int | np.ndarray
    width: int | np.ndarray
    targets: int | np.ndarray


def stack(shapes: Iterable[Shape]) -> Shape:
    """Many shapes as one of arrays."""
    table = np.array(list(shapes), dtype=np.float64).reshape(-1, 3)
    return Shape(*table.T)


Count = Callable[[Shape, int], Number]
"""(shape, block or 0) -> S."""


def all_keys(shape: Shape, block: int) -> Number:
    """All keys, whatever the block."""
    return shape.width


def block_keys(shape: Shape, block: int) -> Number:
    """A block of queries takes scores with all keys."""
    return np.minimum(shape.width, block) if block else shape.width


def causal_keys(shape: Shape, block: int) -> Number:
    """The last full block sees keys up to its end; the rest of the queries sees all."""
    if not block:
        return shape.width
    full, rest = shape.width // block * block, shape.width % block
    return np.maximum(np.minimum(block, shape.width) * full, rest * shape.width) / shape.width


@dataclass(frozen=True)
class Curve:
    """c + a·B·T + b·B·T·S."""

    coefficients: tuple[float, float, float] = (0.0, 0.0, 0.0)
    count: Count = all_keys

    def at(self, shape: Shape, block: int) -> Number:
        """The value for a shape; block 0: S is T."""
        c, a, b = self.coefficients
        tokens = shape.rows * shape.width
        return c + a * tokens + b * tokens * self.count(shape, block)


def fit(values: Sequence[float], features: np.ndarray) -> tuple[float, ...]:
    """Coefficients ≥ 0 that make the sum of squared relative errors least.

    Tries every subset of the features and keeps the best solution without negative ones: exact for
    so few (Lawson and Hanson's problem, by enumeration).

    Args:
        values: (N,), at least 0.
        features: (N, F), F at most 4.
    """
    target = np.asarray(values, dtype=np.float64)
    weights = 1 / (target + 1e-3 * max(1e-12, float(target.max(initial=0.0))))
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    rows, wanted = features / scale * weights[:, None], target * weights
    best, best_error = np.zeros(features.shape[1]), float(np.sum(wanted**2))
    for count in range(1, features.shape[1] + 1):
        for subset in itertools.combinations(range(features.shape[1]), count):
            part = rows[:, subset]
            solution = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(np.sum((part @ solution - wanted) ** 2))
            if (solution >= 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(features.shape[1]), error
                best[list(subset)] = solution
    return tuple(best / scale)


def curve(
    readings: Sequence[Reading],
    value: Callable[[Reading], float],
    count: Count,
    *,
    constant: bool = True,
    by_keys: bool = True,
) -> Curve:
    """The curve through readings, with or without its constant and its part by keys."""
    if not readings:
        return Curve()
    used = [i for i, wanted in enumerate((constant, True, by_keys)) if wanted]
    columns = np.array([features_of(x.point, count) for x in readings])[:, used]
    found = dict(zip(used, fit([value(x) for x in readings], columns), strict=True))
    return Curve((found.get(0, 0.0), found[1], found.get(2, 0.0)), count)


def shape_of(point: Point) -> Shape:
    """The shape of a point's micro-batch."""
    return Shape(point.rows, point.width, point.targets)


def features_of(point: Point, count: Count) -> tuple[float, float, float]:
    """What the three coefficients of a curve are multiplied with."""
    shape, tokens = shape_of(point), point.rows * point.width
    return 1.0, tokens, tokens * float(count(shape, point.way.attention_block))
