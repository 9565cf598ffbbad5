"""Numbers as people read them; a missing one is a dash."""

from __future__ import annotations

import math
from typing import Any

NONE = "–"


def count(value: Any) -> str:
    """`12,345`."""
    return NONE if value is None else f"{value:,}"


def length(value: float) -> str:
    """Tokens: whole where it is whole, else one digit after the point."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def nats(value: Any) -> str:
    """A loss, four digits after the point."""
    return NONE if not _finite(value) else f"{value:.4f}"


def signed(value: Any, digits: int = 4) -> str:
    """A change with its sign, a true minus."""
    return NONE if not _finite(value) else f"{value:+.{digits}f}".replace("-", "−")


def short(value: Any) -> str:
    """Four significant digits, `1e-05` where very small or large."""
    if not _finite(value):
        return NONE
    return f"{'−' if value < 0 else ''}{abs(value):.4g}"


def percent(share: Any, digits: int = 1) -> str:
    """`12.3%`."""
    return NONE if not _finite(share) else f"{100 * share:.{digits}f}%"


def gb(value: Any) -> str:
    """Gigabytes (1e9), three digits after the point below 10."""
    if not _finite(value):
        return NONE
    return f"{value:.{3 if value < 10 else 1}f}\u00a0GB"


def seconds(value: Any) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if not _finite(value):
        return NONE
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plural(n: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
