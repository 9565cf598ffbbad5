"""One comparison of the proof, and how far two trees of arrays are from each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


@dataclass(frozen=True)
class Finding:
    """One line of the proof.

    Attributes:
        part: `cuts`, `updates`, `resume` or `memory`.
        what: What was compared with what.
        measured: ‖a − b‖₂ / ‖b‖₂ over all trained arrays together: of gradients, or of what
            training changed in the weights. None where nothing was compared.
        loss: |a − b| / |b| of the losses, None where there are none.
        tolerance: The most that either may be.
        note: Why nothing was compared, or what a difference was.
    """

    part: str
    what: str
    measured: float | None
    tolerance: float
    loss: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether it is within its tolerance; None where nothing was compared."""
        if self.measured is None:
            return None
        return all(x <= self.tolerance for x in (self.measured, self.loss or 0.0))

    @property
    def result(self) -> str:
        """One word for people."""
        return {None: "not used", True: "ok", False: "MISSED"}[self.passed]

    def record(self) -> dict[str, Any]:
        """For reports/prove.json; JSON has no word for NaN and infinity: they stand as text."""
        numbers = {name: _number(getattr(self, name)) for name in ("measured", "loss")}
        return {**asdict(self), **numbers, "passed": self.passed}

    def row(self) -> list[str]:
        """For the table."""
        tolerance = "" if self.measured is None else shown(self.tolerance)
        return [self.what, shown(self.measured), shown(self.loss), tolerance, self.result]

    def line(self) -> str:
        """For the console, when it is made."""
        note = f": {self.note}" if self.note else ""
        return f"{self.result:<8} {shown(self.measured):<8} {self.what}{note}"


def shown(value: float | None) -> str:
    """A relative difference for people."""
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def distance(a: Any, b: Any, start: Mapping[str, mx.array] | None = None) -> float:
    """‖a − b‖₂ / ‖b‖₂ over all arrays of two trees, in float32; with `start`, ‖b − start‖₂ below.

    0 where both are equal, infinity or NaN where one of them is not finite.
    """
    first, second = dict(tree_flatten(a)), dict(tree_flatten(b))
    if first.keys() != second.keys():
        raise ValueError(f"other arrays: {sorted(first.keys() ^ second.keys())[:4]}")
    base = {name: start[name] if start else mx.array(0.0) for name in second}
    difference = norm({name: _wide(first[name]) - _wide(x) for name, x in second.items()})
    return relative(difference, norm({k: _wide(x) - _wide(base[k]) for k, x in second.items()}))


def relative(difference: float, size: float) -> float:
    """`difference / size`, 0 where there is no difference."""
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


def norm(tree: Any) -> float:
    """The Euclidean norm over all arrays of a tree together."""
    squares = [mx.square(_wide(x)).sum() for _, x in tree_flatten(tree)]
    return math.sqrt(sum(mx.stack(squares).tolist()))


def _wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
