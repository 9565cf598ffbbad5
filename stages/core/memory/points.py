"""What is measured: ways of computing, points, and readings. Plain values that travel as JSON.

Peaks are in bytes above what rests in memory between steps (weights, adapters, optimizer state,
summed gradient). Phases are measured apart, since each can be the one that binds:

frozen     forward of the frozen layers, nothing kept
check      the comparison of the plan with the plain way, before the first update
update     the optimizer's step
attention  attention of one layer alone, forward and backward
head       the loss at targets alone, on hidden states that are already there
layers     forward and backward of the trained layers, with very few targets
whole      a step as it is trained, all of it together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stages.core.memory.plan import Plan


@dataclass(frozen=True, order=True)
class Way:
    """How the layers are computed.

    Attributes:
        recompute, place, attention_block, compiled: As in `Plan`.
        cached: From stored activations, without the frozen layers.
    """

    recompute: int = 0
    place: str = "spread"
    attention_block: int = 0
    compiled: bool = False
    cached: bool = False

    def told(self) -> str:
        """For a person: what differs from the plain way."""
        words = []
        if self.recompute == 1:
            words.append("recompute all layers")
        elif self.recompute and self.place != "spread":
            words.append(f"recompute the {self.place} half")
        elif self.recompute:
            words.append(f"recompute 1 layer in {self.recompute}")
        if self.attention_block:
            words.append(f"attention blocks of {self.attention_block}")
        if self.compiled:
            words.append("compiled")
        return ", ".join(words) or "keep everything"


def way_of(plan: Plan) -> Way:
    """The way of a plan."""
    return Way(
        recompute=plan.recompute,
        place=plan.recompute_place,
        attention_block=plan.attention_block,
        compiled=plan.compiled,
        cached=plan.activation_cache,
    )


@dataclass(frozen=True, order=True)
class Point:
    """One thing to measure.

    Attributes:
        kind: As above.
        rows, width, targets: Of the micro-batch; `head` uses `targets` only, `update` none of them,
            `attention` rows and width.
        loss_chunk: Targets per piece of the loss; 0: one piece.
        way: How the layers are computed.
        limit_gb: `Plan.memory_limit_gb` of a `whole` step; 0: none.
    """

    kind: str
    rows: int = 1
    width: int = 1
    targets: int = 1
    loss_chunk: int = 0
    way: Way = field(default_factory=Way)
    limit_gb: float = 0.0

    def plan(self) -> Plan:
        """A plan under which a micro-batch of this shape is one step."""
        return Plan(
            batch_size=self.rows,
            batch_tokens=self.rows * self.width,
            widths=(self.width,),
            recompute=self.way.recompute,
            recompute_place=self.way.place,
            loss_chunk=self.loss_chunk,
            attention_block=self.way.attention_block,
            compiled=self.way.compiled,
            memory_limit_gb=self.limit_gb or None,
        )

    def record(self) -> dict[str, Any]:
        """The point as JSON-like values."""
        return asdict(self)


@dataclass(frozen=True)
class Reading:
    """What a point gave.

    Attributes:
        peak: Bytes above the resting state at its highest.
        kept: Of `layers` and `attention`: bytes above it between forward and backward.
        seconds: Of one run.
        died: "", or why there is no number.
    """

    point: Point
    peak: int = 0
    kept: int = 0
    seconds: float = 0.0
    died: str = ""

    def record(self) -> dict[str, Any]:
        """The reading as JSON-like values."""
        return asdict(self)


@dataclass(frozen=True)
class Rest:
    """What rests in memory between steps, and what the model is made of.

    Attributes:
        whole: Bytes of all weights, adapters included.
        above: Bytes of them that stay when the frozen layers' output is stored; `whole` before
            that was tried, or where it can't be.
        trained: Bytes of the trained arrays.
        state: Bytes of the optimizer's state and of the summed gradient.
        layers, cut: Number of layers, index of the first trained one.
        recurrent: Trained layers with a state that runs through time.
        attention: Attention calls of one forward pass that can be done in blocks.
        causal: All of them have a plain causal mask.
        at_targets: The loss can be computed at targets alone.
        notes: One line for everything that is switched off on this architecture.
    """

    whole: int
    above: int
    trained: int
    state: int
    layers: int
    cut: int
    recurrent: int
    attention: int
    causal: bool
    at_targets: bool
    notes: tuple[str, ...] = ()

    def resting(self, cached: bool) -> int:
        """Bytes at rest in training."""
        return (self.above if cached else self.whole) + self.state

    def record(self) -> dict[str, Any]:
        """As JSON-like values."""
        return asdict(self)


def point_from(record: Mapping[str, Any]) -> Point:
    """The point of a record; raises KeyError or TypeError for another version's."""
    return Point(**{**record, "way": Way(**record["way"])})


def reading_from(record: Mapping[str, Any]) -> Reading:
    """The reading of a record; raises KeyError or TypeError for another version's."""
    return Reading(**{**record, "point": point_from(record["point"])})


def rest_from(record: Mapping[str, Any]) -> Rest:
    """The rest of a record; raises KeyError or TypeError for another version's."""
    return Rest(**{**record, "notes": tuple(record["notes"])})
