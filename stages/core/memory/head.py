"""Memory and time of the loss at targets, from readings of kind `head`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from stages.core.memory.curves import Number
from stages.core.memory.points import Reading


class Head:
    """The loss at targets alone.

    A loss in one piece has fewer pieces at work at a time than one in many, so it is measured
    apart. Between measured sizes of pieces a line is drawn, beyond them memory is in ratio.

    Args:
        readings: Of kind `head`, smallest first; two with equal pieces tell what each further
            target takes beside its piece.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.known = bool(readings)
        self.per_target = bytes_per_target(readings)
        self._readings = {x.point.loss_chunk: x for x in readings}
        pieces = {
            chunk: x.peak - x.point.targets * self.per_target
            for chunk, x in self._readings.items()
            if chunk
        }
        self._sizes = np.array(sorted(pieces), dtype=np.float64)
        self._pieces = np.array([pieces[chunk] for chunk in sorted(pieces)], dtype=np.float64)

    def bytes(self, targets: Number, chunk: int) -> Number:
        """Bytes beside what the layers keep."""
        targets = np.asarray(targets, dtype=np.float64)
        beside = targets * self.per_target
        whole = self._readings.get(0)
        in_one = self._in_pieces(targets) if whole is None else targets * per_target(whole) - beside
        if not chunk:
            return in_one + beside
        return beside + np.where(targets <= chunk, in_one, self._in_pieces(np.float64(chunk)))

    def seconds_per_target(self, chunk: int) -> float:
        """Seconds per target, of the nearest measured size of pieces."""
        if not self._readings:
            return 0.0
        one_piece = 2 * float(self._sizes.max(initial=0.0))
        nearest = min(self._readings, key=lambda c: abs((c or one_piece) - (chunk or one_piece)))
        reading = self._readings[nearest]
        return reading.seconds / reading.point.targets

    def _in_pieces(self, piece: Number) -> Number:
        if not len(self._sizes):
            return piece * (per_target(self._readings[0]) - self.per_target)
        sizes = self._sizes
        beyond = np.where(piece < sizes[0], piece / sizes[0], np.maximum(1, piece / sizes[-1]))
        return np.interp(piece, sizes, self._pieces) * beyond


def per_target(reading: Reading) -> float:
    """Bytes per target of a reading."""
    return reading.peak / reading.point.targets


def bytes_per_target(readings: Sequence[Reading]) -> float:
    """Bytes that each further target takes beside its piece: pairs of points with equal pieces."""
    by_chunk: dict[int, list[Reading]] = {}
    for reading in readings:
        if reading.point.loss_chunk:
            by_chunk.setdefault(reading.point.loss_chunk, []).append(reading)
    slopes = [
        (b.peak - a.peak) / (b.point.targets - a.point.targets)
        for found in by_chunk.values()
        for a, b in itertools.pairwise(found)
        if b.point.targets > a.point.targets
    ]
    return max(0.0, float(np.median(slopes))) if slopes else 0.0
