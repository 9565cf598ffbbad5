"""Every plan that could be taken, with its predicted memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from stages.core import files, paths
from stages.core.activations import identity, size
from stages.core.config.settings import Settings
from stages.core.memory import agenda, rule
from stages.core.memory.budget import Budget
from stages.core.memory.fit import Model, Shape
from stages.core.memory.plan import Plan
from stages.core.memory.points import Way, way_of
from stages.core.memory.rule import cut_fixed, recompute_fixed
from stages.core.memory.work import Load, Work
from stages.core.model.manifest import Manifest
from stages.core.update import batching

MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Padded tokens of a micro-batch that are tried, as multiples of the longest example."""
SHORT_CHECKS = (64, 32)
"""Tokens of the example that a plan is checked on, where the budget has no room for more."""
RESERVE = 0.05
"""Share of a step's own memory that the allocator's cache gets at least."""
SOFT = 0.05
"""Share of a step's own memory by which MLX may exceed its limit: 0.04 was seen on the CPU."""
THROTTLED_BYTES, THROTTLED_SECONDS = 0.75, 2.0
"""What a step needs and takes, in ratio, when MLX may not run ahead: measured on the CPU, 0.70 to
0.72 and 1 to 2.6; the worst micro-batch is run in any case."""


@dataclass(frozen=True)
class Candidate:
    """One plan with what it is predicted to need.

    Attributes:
        plan: Without a cache limit yet.
        way: How its layers are computed.
        worst: The shape that needs most.
        step: Bytes of memory at the highest moment of an update, weights included.
        start: Bytes at the highest moment before the first update (check, activation cache).
        transient: Bytes of `step` above what rests in memory.
        seconds: Per update.
        start_seconds: Once, for the activation cache.
        valid_seconds: Of the frozen layers in all validations, where their output isn't stored.
    """

    plan: Plan
    way: Way
    worst: Shape
    step: float
    start: float
    transient: float
    seconds: float
    start_seconds: float
    valid_seconds: float = 0.0

    @property
    def bytes(self) -> float:
        """What the budget must hold: the highest moment, and the smallest cache."""
        return max(self.step + RESERVE * self.transient, self.start)

    def total_seconds(self, updates: int) -> float:
        """Of the whole run."""
        return self.start_seconds + self.valid_seconds + updates * self.seconds


@dataclass(frozen=True)
class Case:
    """What a choice is made for.

    Attributes:
        settings, manifest: Of the run.
        kind: Of the device.
        work: What the run computes.
        limit: Memory it may take.
    """

    settings: Settings
    manifest: Manifest
    kind: str
    work: Work
    limit: Budget

    @property
    def widths(self) -> tuple[int, ...]:
        """Padded lengths of the run's micro-batches."""
        return batching.widths(self.work.lengths, self.settings.split.max_seq_length)


def every(case: Case, model: Model) -> list[Candidate]:
    """All candidates: what the settings leave open, in all combinations."""
    found, on_disk, open_ways = [], stored(case, model), list(ways(case, model))
    for base in bases(case):
        load = case.work.load(base)
        for way in open_ways:
            for chunk in agenda.chunks(case.settings.memory, case.kind):
                candidate = predict(planned(base, way, chunk), model, load)
                candidate = checked_within(candidate, model, case)
                candidate = replace(candidate, start_seconds=0.0) if on_disk else candidate
                found.append(candidate)
                if case.kind == "cpu" and candidate.bytes > case.limit.bytes:
                    found.append(throttled(candidate, case.limit))
    return found


def checked_within(found: Candidate, model: Model, case: Case) -> Candidate:
    """The candidate, checked on a shorter example where the whole model leaves no room for more."""
    for tokens in SHORT_CHECKS:
        if found.start <= case.limit.bytes:
            break
        plan = replace(found.plan, check_tokens=tokens)
        found = replace(found, plan=plan, start=_start(plan, case.work, model)[0])
    return found


def throttled(found: Candidate, limit: Budget) -> Candidate:
    """The candidate with MLX kept from running ahead of the budget."""
    spare = (1 - THROTTLED_BYTES) * found.transient
    wanted = min(found.step, max(found.step - spare, limit.bytes - RESERVE * found.transient))
    return replace(
        found,
        plan=replace(found.plan, memory_limit_gb=round((wanted - SOFT * found.transient) / 1e9, 4)),
        step=wanted,
        seconds=found.seconds * THROTTLED_SECONDS,
    )


def bases(case: Case) -> list[Plan]:
    """Plans that differ in the size of their micro-batches alone."""
    widths = case.widths
    fixed = cut_fixed(case.settings, widths)
    if fixed is not None:
        return [fixed]
    most = case.work.rows * widths[-1]
    tokens = sorted({min(most, int(multiple * widths[-1])) for multiple in MULTIPLES})
    start = rule.STARTS[case.kind]
    return [Plan(case.work.rows, count, widths, start_tokens=start) for count in tokens]


def ways(case: Case, model: Model) -> Iterator[Way]:
    """Ways that the settings leave open and that can be predicted."""
    memory, fitted = case.settings.memory, model.ways()
    stores = cached_choices(case, model)
    for block in agenda.blocks(memory, case.kind, case.work.longest):
        for k, place in recomputing(recompute_fixed(memory.grad_checkpoint)):
            needed = {(j, block > 0) for j in ({k} if k in (0, 1) else {0, 1})}
            if needed <= fitted:
                for cached in stores:
                    yield Way(k, place, block, rule.COMPILED[case.kind], cached)


def recomputing(fixed: int | None) -> list[tuple[int, str]]:
    """(every k-th layer, place) to try."""
    if fixed is not None:
        return [(fixed, "spread")]
    return [(0, "spread"), (4, "spread"), (2, "spread"), (2, "first"), (2, "last"), (1, "spread")]


def cached_choices(case: Case, model: Model) -> list[bool]:
    """Whether training may come from stored activations, from the whole model, or both."""
    memory = case.settings.memory
    if not model.cached or memory.activation_cache == "off":
        return [False]
    if memory.activation_cache == "on":
        return [True]
    return [True, False] if stored(case, model) or has_room(case) else [False]


def stored(case: Case, model: Model) -> bool:
    """Whether the activations of this run are on the disk from before."""
    cut, made = model.survey.rest.cut, [split for split in case.work.splits if len(split)]
    folders = [identity.folder(case.manifest, cut, split, case.kind) for split in made]
    return all(folder.is_dir() for folder in folders)


def has_room(case: Case) -> bool:
    """Whether the disk and `memory.activation_cache_limit_gb` have room for the activations."""
    work = case.work
    need = size.predicted_gb(case.manifest, np.concatenate([work.lengths, work.valid_lengths]))
    room = files.free_gb(paths.cache("activations")) - size.RESERVE_GB
    return need <= min(room, size.limit_gb(case.settings.memory.activation_cache_limit_gb))


def planned(base: Plan, way: Way, chunk: int) -> Plan:
    """The plan of one way."""
    return replace(
        base,
        recompute=way.recompute,
        recompute_place=way.place,
        attention_block=way.attention_block,
        activation_cache=way.cached,
        compiled=way.compiled,
        loss_chunk=chunk,
    )


def predict(plan: Plan, model: Model, load: Load) -> Candidate:
    """The candidate of a plan.

    Args:
        load: The work as a plan with these micro-batches cuts it.
    """
    way, rest, chunk = way_of(plan), model.survey.rest, plan.loss_chunk
    peaks = model.peak(way, load.stacked, chunk)
    worst = int(np.argmax(peaks))
    transient = max(float(peaks[worst]), model.update_peak())
    seconds = float(np.dot(load.counts, model.seconds(way, load.stacked, chunk)))
    start, start_seconds = _start(plan, load.work, model)
    return Candidate(
        plan=plan,
        way=way,
        worst=load.shapes[worst],
        step=rest.resting(way.cached) + transient,
        start=start,
        transient=transient,
        seconds=seconds / len(load.work.batches) + model.update_seconds(),
        start_seconds=start_seconds,
        valid_seconds=0.0 if plan.activation_cache else _valid_seconds(plan, load.work, model),
    )


def _start(plan: Plan, work: Work, model: Model) -> tuple[float, float]:
    """(bytes, seconds) before the first update: the check, and storing activations."""
    rest = model.survey.rest
    example = batching.nearest(work.lengths, work.targets, plan.check_tokens)
    peak = model.check_peak(batching.width_for(int(work.lengths[example]), plan))
    if not plan.activation_cache:
        return rest.whole + peak, 0.0
    tokens = int(work.lengths.sum()) + int(work.valid_lengths.sum())
    stored, seconds = _frozen(plan, work, model)
    return rest.whole + max(peak, stored), seconds * tokens


def _valid_seconds(plan: Plan, work: Work, model: Model) -> float:
    """Seconds of the frozen layers in all validations of the run."""
    tokens = work.validations * int(work.valid_lengths.sum())
    return tokens * _frozen(plan, work, model)[1] if tokens else 0.0


def _frozen(plan: Plan, work: Work, model: Model) -> tuple[float, float]:
    """(bytes above rest, seconds a token) of the frozen layers, in the largest micro-batch."""
    width = max(plan.widths[-1], work.longest)
    rows = max(1, plan.batch_tokens // width)
    peak, seconds = model.frozen(Shape(rows, width, 1))
    return peak, seconds / (rows * width)
