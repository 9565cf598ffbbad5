"""Peak memory and time of a step of any shape, from measured points.

A phase's peak is  c + a·B·T + b·B·T·S,  with B rows, T tokens and S keys that a query's scores are
kept for (T, or the block of attention in blocks). The peak of a step is that of its highest phase:

layers: forward and backward of the trained layers, fitted on points with very few targets
head:   what the layers keep for the backward pass, plus the loss at targets, measured alone

Coefficients are never negative and are fitted to relative errors. Only "keep everything" and
"recompute all layers" are fitted; what lies between is worked out from these two:

    kept(k) = kept(0) + share · (kept(1) - kept(0)),        share of the layers that is recomputed
    peak(k) = kept(k) + max(g, w - above · one layer's own activations)

with g and w what the backward pass needs beyond what is kept, without and with recomputation, and
`above` the number of layers over the topmost recomputed one that keep theirs. Steps measured whole
correct the sum for their way of computing.

Shapes may hold arrays: then all results are arrays, one value per micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stages.core.memory.placement import chosen_layers
from stages.core.memory.points import Point, Reading, Rest, Way

FEW_TARGETS = 8
"""Targets of a point of kind `layers`."""
ENOUGH = 3
"""Points that a way is fitted on, at least."""

Number = float | np.ndarray


@dataclass(frozen=True)
class Survey:
    """What is known of one model, what is trained of it, and this machine.

    Attributes:
        rest: What rests in memory.
        readings: Latest reading of each point.
    """

    rest: Rest
    readings: dict[Point, Reading]

    def of(self, kind: str) -> list[Reading]:
        """Readings of one kind that gave a number, smallest first."""
        found = [x for point, x in self.readings.items() if point.kind == kind and not x.died]
        size = lambda x: (x.point.rows * x.point.width, x.point.width, x.point.targets)
        return sorted(found, key=size)


class Shape(NamedTuple):
    """Rows, padded width and targets of a micro-batch, or of many (arrays)."""

    rows: int | np.ndarray
    width: int | np.ndarray
    targets: int | np.ndarray


def stack(shapes: Iterable[Shape]) -> Shape:
    """Many shapes as one of arrays."""
    table = np.array(list(shapes), dtype=np.float64).reshape(-1, 3)
    return Shape(*table.T)


@dataclass(frozen=True)
class Curve:
    """c + a·B·T + b·B·T·S."""

    coefficients: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def at(self, shape: Shape, block: int) -> Number:
        """The value for a shape; block 0: S is T."""
        c, a, b = self.coefficients
        tokens = shape.rows * shape.width
        return c + a * tokens + b * tokens * _keys(shape, block)


@dataclass(frozen=True)
class Cost:
    """What layers cost: bytes at the peak, bytes kept, seconds."""

    peak: Curve = Curve()
    kept: Curve = Curve()
    seconds: Curve = Curve()


class Model:
    """Predicts peak (bytes above rest) and seconds of steps.

    Args:
        survey: With points of kind `layers`, and of kind `head` where the loss is computed at
            targets.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.cached = any(x.point.way.cached for x in survey.of("layers"))
        """Points are from stored activations; the frozen layers are measured apart."""
        self._costs = _costs(survey.of("layers"))
        self._frozen = _cost(survey.of("frozen"))
        self._head = Head(survey.of("head"))
        self._corrections = {}
        for reading in survey.of("whole"):
            way, shape = self._base(reading.point.way)[0], shape_of(reading.point)
            predicted = self._phases(way, shape, reading.point.loss_chunk)
            self._corrections[way] = reading.peak / max(1.0, predicted)

    def ways(self) -> set[tuple[int, bool]]:
        """(recompute, in blocks) of what was fitted."""
        return {(way.recompute, way.attention_block > 0) for way in self._costs}

    def peak(self, way: Way, shape: Shape, chunk: int) -> Number:
        """Bytes above the resting state at the highest moment of a step."""
        way, frozen = self._base(way)
        found = self._phases(way, shape, chunk) * self._corrections.get(way, 1.0)
        if not frozen:
            return found
        return np.maximum(found, self._frozen.peak.at(shape, way.attention_block))

    def seconds(self, way: Way, shape: Shape, chunk: int) -> Number:
        """Seconds of one step."""
        way, frozen = self._base(way)
        total = self._seconds(way, shape) + shape.targets * self._head.seconds_per_target(chunk)
        if not frozen:
            return total
        return total + self._frozen.seconds.at(shape, way.attention_block)

    def kept(self, way: Way, shape: Shape) -> Number:
        """Bytes that the layers keep between forward and backward."""
        return self._layers(self._base(way)[0], shape)[0]

    def frozen(self, shape: Shape) -> tuple[Number, Number]:
        """(bytes above rest, seconds) of the frozen layers alone."""
        return self._frozen.peak.at(shape, 0), self._frozen.seconds.at(shape, 0)

    def update_peak(self) -> float:
        """Bytes above rest of the optimizer's step."""
        return max((x.peak for x in self.survey.of("update")), default=0)

    def update_seconds(self) -> float:
        """Seconds of the optimizer's step."""
        return max((x.seconds for x in self.survey.of("update")), default=0.0)

    def check_peak(self, tokens: int) -> float:
        """Bytes above the weights while a plan is checked on an example of so many tokens."""
        readings = self.survey.of("check")
        return max((x.peak * max(1.0, tokens / x.point.width) for x in readings), default=0.0)

    def _phases(self, way: Way, shape: Shape, chunk: int) -> Number:
        kept, peak = self._layers(way, shape)
        if not self._head.known:
            return peak
        more = np.maximum(0, shape.targets - FEW_TARGETS) * self._head.per_target
        return np.maximum(peak + more, kept + self._head.bytes(shape.targets, chunk))

    def _layers(self, way: Way, shape: Shape) -> tuple[Number, Number]:
        """(bytes kept, peak) of the layers; attention in one block is attention not in blocks."""
        if not self._inside(way):
            return self._bytes(way, shape)
        short = shape.width <= way.attention_block
        whole = self._bytes(replace(way, attention_block=0), shape)
        parts = self._bytes(way, shape)
        return np.where(short, whole[0], parts[0]), np.where(short, whole[1], parts[1])

    def _inside(self, way: Way) -> bool:
        """Whether the way is in blocks, and attention not in blocks was measured too."""
        return (
            way.attention_block > 0 and self._cost(replace(way, attention_block=0), 0) is not None
        )

    def _bytes(self, way: Way, shape: Shape) -> tuple[Number, Number]:
        block = way.attention_block
        own = self._cost(way, way.recompute) if way.place == "spread" else None
        if own is not None:
            return own.kept.at(shape, block), own.peak.at(shape, block)
        none, every = self._cost(way, 0), self._cost(way, 1)
        count, share, above = self._placed(way)
        kept_0, kept_1 = none.kept.at(shape, block), every.kept.at(shape, block)
        kept = kept_0 + share * (kept_1 - kept_0)
        plain = none.peak.at(shape, block) - kept_0
        again = every.peak.at(shape, block) - kept_1 - above * (kept_0 - kept_1) / count
        return kept, kept + (np.maximum(plain, again) if share else plain)

    def _placed(self, way: Way) -> tuple[int, float, int]:
        """(trained layers, share of them recomputed, how many above the topmost of those)."""
        trained = range(self.survey.rest.layers - self.survey.rest.cut)
        chosen = chosen_layers(trained, way.recompute, way.place)
        return len(trained), len(chosen) / len(trained), len(trained) - 1 - max(chosen, default=-1)

    def _seconds(self, way: Way, shape: Shape) -> Number:
        """Seconds of the layers; recomputation is never taken to save time."""
        if self._inside(way):
            short = shape.width <= way.attention_block
            whole = self._seconds(replace(way, attention_block=0), shape)
            return np.where(short, whole, np.maximum(0, self._own_seconds(way, shape)))
        return self._own_seconds(way, shape)

    def _own_seconds(self, way: Way, shape: Shape) -> Number:
        block = way.attention_block
        none, every = self._cost(way, 0), self._cost(way, 1)
        if none is None:
            return every.seconds.at(shape, block)
        least = none.seconds.at(shape, block)
        if every is None or not way.recompute:
            return least
        return least + self._placed(way)[1] * np.maximum(0, every.seconds.at(shape, block) - least)

    def _cost(self, way: Way, recompute: int) -> Cost | None:
        return self._costs.get(_family(replace(way, recompute=recompute)))

    def _base(self, way: Way) -> tuple[Way, bool]:
        """The way as it was measured, and whether the frozen layers come on top."""
        if way.cached or not self.cached:
            return way, False
        return replace(way, cached=True), True


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
        self.per_target = _bytes_per_target(readings)
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
        in_one = (
            self._in_pieces(targets) if whole is None else targets * _per_target(whole) - beside
        )
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
            return piece * (_per_target(self._readings[0]) - self.per_target)
        sizes = self._sizes
        beyond = np.where(piece < sizes[0], piece / sizes[0], np.maximum(1, piece / sizes[-1]))
        return np.interp(piece, sizes, self._pieces) * beyond


def shape_of(point: Point) -> Shape:
    """The shape of a point's micro-batch."""
    return Shape(point.rows, point.width, point.targets)


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


def _costs(readings: Sequence[Reading]) -> dict[Way, Cost]:
    """Costs of every way with enough points; blocks of all sizes share one fit."""
    groups: dict[Way, list[Reading]] = {}
    for reading in readings:
        groups.setdefault(_family(reading.point.way), []).append(reading)
    return {way: _cost(found) for way, found in groups.items() if len(found) >= ENOUGH}


def _cost(readings: Sequence[Reading]) -> Cost:
    if not readings:
        return Cost()
    features = np.array([_features(x.point) for x in readings])
    curve = lambda values: Curve(fit(values, features))
    return Cost(
        curve([x.peak for x in readings]),
        curve([x.kept for x in readings]),
        curve([x.seconds for x in readings]),
    )


def _features(point: Point) -> tuple[float, float, float]:
    shape, tokens = shape_of(point), point.rows * point.width
    return 1.0, tokens, tokens * float(_keys(shape, point.way.attention_block))


def _keys(shape: Shape, block: int) -> Number:
    return np.minimum(shape.width, block) if block else shape.width


def _family(way: Way) -> Way:
    """Ways that share a fit: attention in blocks of any size is one; the place is not fitted."""
    return replace(way, attention_block=1 if way.attention_block else 0, place="spread")


def _per_target(reading: Reading) -> float:
    return reading.peak / reading.point.targets


def _bytes_per_target(readings: Sequence[Reading]) -> float:
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
