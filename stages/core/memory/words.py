"""Sizes in words: GB, and MB where two decimals of a GB would say nothing."""

from __future__ import annotations

import math

SMALL = 1e7
"""Bytes below which a size is told in MB."""


def size(count: float, digits: int = 2) -> str:
    """A number of bytes for a person: GB with so many decimals, below 0.01 GB in MB."""
    if abs(count) < SMALL:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.{digits}f} GB"


def enough(count: float) -> str:
    """GB that hold so many bytes, as a setting: rounded up, never down, to a thousandth."""
    return f"{math.ceil(count / 1e6) / 1000:.3f}"
