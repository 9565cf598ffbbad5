"""Which layers are recomputed: placement matters as much as their number. No MLX."""

from __future__ import annotations

from collections.abc import Sequence

PLACES = ("spread", "first", "last")


def chosen_layers(trained: Sequence[int], k: int, place: str = "spread") -> list[int]:
    """Which of the trained layers are recomputed.

    Args:
        trained: Indices of the trained layers, ascending.
        k: 0: none; 1: all; k: every k-th.
        place: `spread` (every k-th), or the `first` or `last` half of them, for k of 2.

    Raises:
        ValueError: No such place.
    """
    if place not in PLACES:
        raise ValueError(f"place {place!r}: expected one of {PLACES}")
    if k == 0:
        return []
    if place == "first" and k > 1:
        return list(trained[: len(trained) // 2])
    if place == "last" and k > 1:
        return list(trained[len(trained) - len(trained) // 2 :])
    return list(trained[::k])
