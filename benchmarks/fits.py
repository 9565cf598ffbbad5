"""How a cost grows: c + a·x, or c + a·x + b·x², by least squares. No MLX.

Each point counts by its relative error, since an axis reaches over powers of two and the short end
would count for nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NAMES = ("c", "a", "b")
"""Of the powers 0, 1 and 2."""


@dataclass(frozen=True)
class Fit:
    """One law of one series.

    Attributes:
        c, a, b: Of the powers 0, 1 and 2, in units of y; b is 0.0 in a straight line.
        residual: The largest relative distance of a point from the law.
        spare: Points beyond the law's numbers: with 0 it goes through all points and says nothing.
    """

    c: float
    a: float
    b: float
    residual: float
    spare: int

    def __call__(self, x: float | np.ndarray) -> float | np.ndarray:
        """The law at x."""
        return self.c + self.a * x + self.b * x * x

    def record(self) -> dict[str, Any]:
        """As JSON-like values."""
        return asdict(self)

    def told(self, unit: str, scale: float = 1.0) -> str:
        """In words: `0.12 + 0.0031·x s, within 4%`; y is multiplied by `scale`."""
        parts = [(value * scale, power) for power, value in enumerate((self.c, self.a, self.b))]
        text = ""
        for value, power in parts:
            if not value:
                continue
            sign = (" − " if value < 0 else " + ") if text else ("−" if value < 0 else "")
            text += f"{sign}{_number(abs(value))}{('', '·x', '·x²')[power]}"
        return f"{text or '0'} {unit}, within {self.residual:.0%}"


def fit(x: Sequence[float], y: Sequence[float], square: bool = False) -> Fit | None:
    """The law nearest to the points; None where there are fewer than two different x.

    Args:
        x, y: Equally many, y above 0.
        square: Try b·x² too. It stays out where there are too few points for three numbers and a
            residual, or where b or the slope at 0 would be negative: no cost falls with x.
    """
    points, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    different = len(np.unique(points))
    if different < 2 or (values <= 0).any():
        return None
    if square and different > 3:
        found = _solved(points, values, 3)
        if found.b > 0 and found.a >= 0:
            return found
        if found.b > 0:
            return _solved(points, values, 3, without=1)
    return _solved(points, values, 2)


def _solved(x: np.ndarray, y: np.ndarray, count: int, without: int | None = None) -> Fit:
    powers = [power for power in range(count) if power != without]
    table = np.stack([x**power for power in powers], axis=1) / y[:, None]
    scale = np.abs(table).max(axis=0)
    numbers, *_ = np.linalg.lstsq(table / scale, np.ones(len(y)), rcond=None)
    law = dict.fromkeys(NAMES, 0.0)
    law |= {NAMES[p]: float(v) for p, v in zip(powers, numbers / scale, strict=True)}
    made = Fit(**law, residual=0.0, spare=len(np.unique(x)) - len(powers))
    residual = float(np.abs(made(x) / y - 1).max())
    return Fit(**law, residual=residual, spare=made.spare)


def _number(value: float) -> str:
    """Three digits, without powers of ten above 1e-4."""
    if 1e-4 <= value < 1e4:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{digits}e{int(power)}"
