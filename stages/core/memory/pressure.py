"""Swap that grows while steps get slower: one warning, so that nobody waits for days."""

from __future__ import annotations

from statistics import median

import psutil

GROWTH_BYTES = 500_000_000
SLOWER = 0.6
"""Share of the first steps' speed below which later ones count as slow."""
FEW = 5


class Pressure:
    """Watches tokens per second and swap of a run.

    Attributes:
        told: The warning was given.
    """

    def __init__(self) -> None:
        self.told = False
        self._swap = psutil.swap_memory().used
        self._first: list[float] = []
        self._last: list[float] = []

    def look(self, tokens_per_second: float, swap_used: int | None = None) -> str:
        """After an update: "", or the warning, once.

        Args:
            tokens_per_second: Of this update.
            swap_used: Bytes; default: what the system says.
        """
        if len(self._first) < FEW:
            self._first.append(tokens_per_second)
            return ""
        self._last = [*self._last, tokens_per_second][-FEW:]
        grown = (psutil.swap_memory().used if swap_used is None else swap_used) - self._swap
        before, now = median(self._first), median(self._last)
        slow = len(self._last) == FEW and now < SLOWER * before
        if self.told or not slow or grown < GROWTH_BYTES:
            return ""
        self.told = True
        return (
            f"swap has grown by {grown / 1e9:.1f} GB and training slowed from {before:.0f} to"
            f" {now:.0f} tokens/s: set memory.budget_gb lower (or end other programs) and run"
            " again; training goes on from its checkpoint"
        )
