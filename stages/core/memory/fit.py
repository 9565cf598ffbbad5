"""Peak memory and time of a step of any shape, from measured points.

With B rows, T tokens and S keys, everything here is a sum of c, a·B·T and b·B·T·S (see
`stages.core.memory.curves`). The peak of a step is that of its highest phase:

head:   what the layers keep for the backward pass, plus the loss at targets, measured alone
layers: what they keep, plus what the backward pass works with: in one layer the larger of
        attention, measured alone, with what lies beside it, and of all else

The two are fitted apart, since small points are bound by one and long examples by the other. Only
"keep everything" and "recompute all layers" are fitted; what lies between follows from these:

    kept(k) = kept(0) + share · (kept(1) - kept(0)),        share of the layers that is recomputed
    peak(k) = kept(k) + max(work(0), work(1) + own · (1 - above))

with `own` what one layer keeps and `above` the number of layers over the topmost recomputed one
that keep theirs. Steps measured whole correct the sum for their way of computing.

Shapes may hold arrays: then all results are arrays, one value per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stages.core.memory.curves import (
    Curve,
    Number,
    Shape,
    all_keys,
    block_keys,
    causal_keys,
    curve,
    shape_of,
    stack,
)
from stages.core.memory.head import Head
from stages.core.memory.placement import chosen_layers
from stages.core.memory.points import Point, Reading, Rest, Way
from stages.core.memory.seconds import Seconds

__all__ = ["FEW_TARGETS", "Model", "Shape", "Survey", "shape_of", "stack"]

FEW_TARGETS = 8
"""Targets of a point of kind `layers`."""
CHECK_GRADIENTS = 3
"""Trees like the trained arrays that the check holds at its end."""
LONG = 3
"""Attention shorter than the longest by such a ratio says nothing of peaks."""
ENOUGH = 3
"""Points that a way is fitted on, at least."""


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


@dataclass(frozen=True)
class Work:
    """What the backward pass of one layer works with, beside what is kept.

    Attributes:
        constant: Bytes.
        others: Bytes per token of all but attention, where that is more.
        beside: Bytes per token that lie beside attention, where that is more.
        attention: Bytes of attention alone.
    """

    constant: float
    others: float
    beside: float
    attention: Curve

    def at(self, shape: Shape, block: int) -> Number:
        """Bytes for a shape."""
        tokens = shape.rows * shape.width
        attention = self.beside * tokens + self.attention.at(shape, block)
        return self.constant + np.maximum(self.others * tokens, attention)


@dataclass(frozen=True)
class Cost:
    """What layers cost: bytes kept, bytes worked with, seconds."""

    kept: Curve
    work: Work
    seconds: Seconds


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
        self._costs = _costs(survey)
        self._frozen_peak = curve(survey.of("frozen"), lambda x: x.peak, all_keys)
        self._frozen_seconds = curve(survey.of("frozen"), lambda x: x.seconds, all_keys)
        self._head = Head(survey.of("head"))
        self._corrections = {}
        for reading in survey.of("whole"):
            if reading.point.limit_gb:
                continue
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
        return np.maximum(found, self._frozen_peak.at(shape, way.attention_block))

    def seconds(self, way: Way, shape: Shape, chunk: int) -> Number:
        """Seconds of one step."""
        way, frozen = self._base(way)
        total = self._seconds(way, shape) + shape.targets * self._head.seconds_per_target(chunk)
        if not frozen:
            return total
        return total + self._frozen_seconds.at(shape, way.attention_block)

    def kept(self, way: Way, shape: Shape) -> Number:
        """Bytes that the layers keep between forward and backward."""
        return self._layers(self._base(way)[0], shape)[0]

    def frozen(self, shape: Shape) -> tuple[Number, Number]:
        """(bytes above rest, seconds) of the frozen layers alone."""
        return self._frozen_peak.at(shape, 0), self._frozen_seconds.at(shape, 0)

    def update_peak(self) -> float:
        """Bytes above rest of the optimizer's step."""
        return max((x.peak for x in self.survey.of("update")), default=0)

    def update_seconds(self) -> float:
        """Seconds of the optimizer's step."""
        return max((x.seconds for x in self.survey.of("update")), default=0.0)

    def check_peak(self, tokens: int) -> float:
        """Bytes above the weights while a plan is checked on an example of so many tokens.

        In proportion to the tokens, but for the gradients of both ways and their difference, where
        those are most of it: full fine-tuning.
        """
        gradients = CHECK_GRADIENTS * self.survey.rest.trained
        found = [0.0]
        for x in self.survey.of("check"):
            fixed = min(x.peak, gradients) if gradients > x.peak / 2 else 0
            found.append(fixed + (x.peak - fixed) * max(1.0, tokens / x.point.width))
        return max(found)

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
        none, every = self._cost(way, 0), self._cost(way, 1)
        if none is None:
            kept = every.kept.at(shape, block)
            return kept, kept + every.work.at(shape, block)
        kept, work = none.kept.at(shape, block), none.work.at(shape, block)
        count, share, above = self._placed(way)
        if every is None or not share:
            return kept, kept + work
        own = (kept - every.kept.at(shape, block)) / count
        again = every.work.at(shape, block) + own * (1 - above)
        kept = kept - share * count * own
        return kept, kept + (np.maximum(work, again) if above else again)

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
        """The way as it was measured, and whether the frozen layers come on top.

        Parts are measured uncompiled; whole steps, compiled or not, correct the sum.
        """
        way = replace(way, compiled=False)
        if way.cached or not self.cached:
            return way, False
        return replace(way, cached=True), True


def _costs(survey: Survey) -> dict[Way, Cost]:
    """Costs of every way with enough points; blocks of all sizes share one fit."""
    groups: dict[Way, list[Reading]] = {}
    for reading in survey.of("layers"):
        groups.setdefault(_family(reading.point.way), []).append(reading)
    groups = {way: found for way, found in groups.items() if len(found) >= ENOUGH}
    kept = {way: curve(found, lambda x: x.kept, block_keys) for way, found in groups.items()}
    costs = {}
    for way, found in groups.items():
        none = kept.get(replace(way, recompute=0)) if way.recompute else None
        own = lambda x, a=none, b=kept[way]: _own(x, a, b, survey.rest)
        alike = [x for x in survey.of("layers") if _alike(x.point.way, way)]
        seconds = Seconds(alike, found, survey.of("attention"), survey.rest)
        costs[way] = Cost(kept[way], _work(found, own, survey, none is not None), seconds)
    return costs


def _alike(one: Way, other: Way) -> bool:
    """Ways that differ in attention's blocks alone, which are timed apart."""
    return replace(one, attention_block=0) == replace(other, attention_block=0)


def _own(reading: Reading, none: Curve | None, every: Curve, rest: Rest) -> float:
    """What one layer's activations take beside its input, as they are made again."""
    if none is None:
        return 0.0
    shape, block = shape_of(reading.point), reading.point.way.attention_block
    return float(none.at(shape, block) - every.at(shape, block)) / (rest.layers - rest.cut)


def _work(
    readings: Sequence[Reading], own: Callable[[Reading], float], survey: Survey, apart: bool
) -> Work:
    """Fitted on points; the one with the fewest keys is bound by all else, with most by attention.

    Args:
        own: Bytes that are known to be a layer's own activations, made again.
        apart: Those are left out of `readings`, or were never made again; else attention's own
            part of them is unknown and counted with what it works with.
    """
    count = causal_keys if survey.rest.causal else block_keys
    blocks = readings[0].point.way.attention_block > 0
    alone = [x for x in survey.of("attention") if (x.point.way.attention_block > 0) == blocks]
    # Short ones are there for time: the peak of long ones is predicted.
    widest = max((x.point.width for x in alone), default=0)
    alone = [x for x in alone if LONG * x.point.width > widest]
    recomputed = readings[0].point.way.recompute == 1
    kept = 0 if recomputed and not apart else 1
    attention = curve(alone, lambda x: x.peak - kept * x.kept, count, constant=False)
    work = lambda x: max(0.0, x.peak - x.kept - own(x))
    if not alone:
        c, a, b = curve(readings, work, count).coefficients
        return Work(c, 0.0, a, Curve((0.0, 0.0, b), count))
    seen = lambda x: float(count(shape_of(x.point), x.point.way.attention_block))
    few, many = min(map(seen, readings)), max(map(seen, readings))
    c, a, _ = curve(
        [x for x in readings if seen(x) == few], work, count, by_keys=False
    ).coefficients
    alone_at = lambda x: attention.at(shape_of(x.point), x.point.way.attention_block)
    beside = [(work(x) - c - alone_at(x)) / _tokens(x) for x in readings if seen(x) == many]
    return Work(c, a, max(0.0, float(np.mean(beside))), attention)


def _tokens(reading: Reading) -> int:
    return reading.point.rows * reading.point.width


def _family(way: Way) -> Way:
    """Ways that share a fit: attention in blocks of any size is one; the place is not fitted."""
    return replace(way, attention_block=1 if way.attention_block else 0, place="spread")
