"""An axis for the values of one key: numbers spread or logarithmic, anything else side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from stages.report import svg

LOGARITHMIC_FROM = 8.0
"""Ratio of the largest to the smallest positive number from which on an axis is logarithmic."""
MOST_MARKS = 8


@dataclass(frozen=True)
class Axis:
    """Where values stand between 0 and 1.

    Attributes:
        name: The key.
        kind: `linear`, `log` or `each` (one place per value).
        places: The place of each row, NaN where it has no value.
        marks: (place, text) of the values to write beside the axis.
    """

    name: str
    kind: str
    places: list[float]
    marks: list[tuple[float, str]]


def axis(name: str, values: pd.Series) -> Axis:
    """The axis that fits a column."""
    known = values.dropna()
    if pd.api.types.is_numeric_dtype(values) and len(known):
        low, high = float(known.min()), float(known.max())
        if low > 0 and high / low >= LOGARITHMIC_FROM:
            return _spread(name, "log", values, math.log)
        return _spread(name, "linear", values, float)
    return _each(name, values)


def _spread(name: str, kind: str, values: pd.Series, scale: Any) -> Axis:
    """Numbers at their place; the values themselves as marks where they are few."""
    known = sorted({float(value) for value in values.dropna()})
    low, high = scale(known[0]), scale(known[-1])

    def place(value: float) -> float:
        return 0.5 if high == low else (scale(value) - low) / (high - low)

    shown = known if len(known) <= MOST_MARKS else _round(known, kind)
    return Axis(
        name,
        kind,
        [math.nan if pd.isna(value) else place(float(value)) for value in values],
        [(place(value), svg.label(value)) for value in shown],
    )


def _round(known: list[float], kind: str) -> list[float]:
    """Round numbers inside the range of many values."""
    if kind == "linear":
        return svg.ticks(known[0], known[-1])
    first, last = math.ceil(math.log10(known[0])), math.floor(math.log10(known[-1]))
    powers = [float(f"1e{power}") for power in range(first, last + 1)]
    return powers if len(powers) >= 2 else [known[0], known[-1]]


def _each(name: str, values: pd.Series) -> Axis:
    """One place per value, in the order of their first row."""
    known = list(dict.fromkeys(str(value) for value in values.dropna()))
    places = {text: (i + 0.5) / len(known) for i, text in enumerate(known)}
    return Axis(
        name,
        "each",
        [math.nan if pd.isna(value) else places[str(value)] for value in values],
        [(place, text) for text, place in places.items()],
    )
