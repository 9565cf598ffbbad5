"""Choose the plan of a run: measure, predict, confirm on the worst real micro-batch, or refuse.

Small models under an automatic budget are not worth the seconds of a child process: they get the
rule's plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stages.core.config.settings import Settings
from stages.core.machine.device import Device
from stages.core.memory import agenda, candidates, fixed, limits, refusal, rule
from stages.core.memory.budget import Budget, budget
from stages.core.memory.candidates import Candidate, Case
from stages.core.memory.fit import Model
from stages.core.memory.plan import Plan
from stages.core.memory.points import Point, Way
from stages.core.memory.survey import Survey, Surveyor
from stages.core.memory.words import size
from stages.core.memory.work import work
from stages.core.model.manifest import Manifest
from stages.core.tables import Examples

SMALL_MODEL_BYTES = 64e6
SAME_SPEED = 1.02
"""Plans within this factor of the fastest count as equally fast: the smallest of them is taken."""
MOST_CONFIRMED = 6
"""Worst micro-batches that are run for one choice."""
NEAR = 0.5
"""Below this share of the budget a plan's neighbours need not be measured."""


@dataclass(frozen=True)
class Choice:
    """A plan and why it was chosen.

    Attributes:
        plan: With predictions and cache limit.
        budget: It was chosen under.
        chosen: The candidate behind it, None where nothing was measured.
        all: Every candidate.
        measured_worst: Bytes at the peak of the worst real micro-batch, None where it was not run.
        model: The predictions, None where nothing was measured.
        case: What it was made for.
        points: Points measured now, not known before.
        seconds: The choice took.
        notes: Lines for a person: what is off, what fixed settings cost.
    """

    plan: Plan
    budget: Budget
    case: Case
    chosen: Candidate | None = None
    all: list[Candidate] = field(default_factory=list)
    measured_worst: float | None = None
    model: Model | None = None
    points: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The choice in one line."""
        plan, limit = self.plan, f"budget {size(self.budget.bytes)} ({self.budget.reason})"
        cut = f"micro-batches of at most {plan.batch_size} rows and {plan.batch_tokens} tokens"
        if self.chosen is None:
            return f"plan by rule, nothing measured: {cut}; {limit}"
        store = "frozen layers stored" if plan.activation_cache else "whole model"
        return (
            f"plan: {cut}, {self.chosen.way.told()}, {store}, loss in pieces of"
            f" {plan.loss_chunk or 'all'}; predicted peak {size(plan.predicted_peak_gb * 1e9)} and"
            f" {plan.predicted_seconds:.2f} s an update; {limit}"
        )


def choose(
    settings: Settings,
    manifest: Manifest,
    examples: Examples,
    valid: Examples,
    device: Device,
    *,
    whole_table: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> Choice:
    """The fastest plan that fits this machine's budget now.

    Args:
        settings: The run's; fixed `memory.*` values are kept.
        manifest: Of the base model.
        examples, valid: What is trained and validated.
        device: What computes.
        whole_table: Measure all ways of computing, also those that are not needed to choose.
        note: Called with a line for each point that is measured.

    Raises:
        UserError: Nothing fits; the message has the numbers.
    """
    started = time.monotonic()
    limit = machine_budget(settings, device)
    case = Case(settings, manifest, device.kind, work(settings, examples, valid), limit)
    if not whole_table and not worth_measuring(settings, manifest):
        lengths = np.concatenate([examples.lengths, valid.lengths])
        return Choice(rule.by_rule(settings, manifest, lengths, device.kind), limit, case)
    with Surveyor(settings, manifest, device, note) as surveyor:
        chooser = Chooser(case, surveyor, whole_table)
        best = chooser.run()
    if best is None:
        lengths = np.concatenate([examples.lengths, valid.lengths])
        plan = rule.by_rule(settings, manifest, lengths, device.kind)
        notes = ["no way of computing could be measured on this architecture", *chooser.notes()]
        return Choice(plan, limit, case, notes=notes)
    plan = replace(
        best.plan,
        cache_limit_gb=cache_limit_gb(settings, best, limit),
        predicted_peak_gb=(chooser.measured(best) or best.step) / 1e9,
        predicted_seconds=best.seconds,
    )
    return Choice(
        plan,
        limit,
        case,
        chosen=best,
        all=chooser.all,
        model=chooser.model,
        measured_worst=chooser.measured(best),
        points=surveyor.measured,
        seconds=time.monotonic() - started,
        notes=[*chooser.notes(), *chooser.costs(best)],
    )


def worth_measuring(settings: Settings, manifest: Manifest) -> bool:
    """Whether a run needs more than the rule's plan: a model of some size, or a set budget."""
    return manifest.bytes > SMALL_MODEL_BYTES or settings.memory.budget_gb != "auto"


def machine_budget(settings: Settings, device: Device) -> Budget:
    """The budget of one worker on this machine now."""
    info: dict[str, Any] = {}
    if device.kind != "cpu":
        import mlx.core as mx

        info = mx.device_info()
    found = budget(settings.memory.budget_gb, device.kind, info)
    launch = settings.run.launch
    here = 1 if launch.backend == "nccl" else launch.here()  # with nccl each has its own GPU
    if here > 1 and settings.memory.budget_gb == "auto":
        return Budget(found.bytes // here, f"{found.reason}, shared by {here} workers")
    return found


class Chooser:
    """One choice: what is asked of the surveyor, and what follows from it."""

    def __init__(self, case: Case, surveyor: Surveyor, whole_table: bool) -> None:
        self.case = case
        self.surveyor = surveyor
        self.whole_table = whole_table
        self.cached = agenda.frozen_layers(case.settings, case.manifest)
        self.all: list[Candidate] = []
        self.model: Model | None = None

    def run(self) -> Candidate | None:
        """Measure, choose, confirm; None where nothing could be measured.

        Raises:
            UserError: Nothing fits.
        """
        self._measure(self._ways(more=False))
        best = self._best()
        if self.whole_table or (best and best.bytes > NEAR * self.case.limit.bytes):
            self._measure(self._ways(more=True))
        if not self.all:
            return None
        return self._confirmed()

    def notes(self) -> list[str]:
        """What is off on this architecture."""
        return [] if self.model is None else list(self.model.survey.rest.notes)

    def measured(self, best: Candidate) -> float | None:
        """Bytes at the peak of its worst micro-batch, None where that was not run."""
        reading = self.model.survey.readings.get(self.worst_point(best))
        if reading is None or reading.died:
            return None
        return self.model.survey.rest.resting(best.way.cached) + reading.peak

    def worst_point(self, found: Candidate) -> Point:
        """The worst micro-batch of a candidate, to be run whole.

        The frozen layers add to what rests in memory, not to a step's peak above that: where they
        are measured apart, the step is run without them, in the child that has freed them.
        """
        way = replace(found.way, cached=found.way.cached or self.model.cached)
        limit_gb = found.plan.memory_limit_gb or 0.0
        if limit_gb and way != found.way:
            rest = self.model.survey.rest
            limit_gb -= (rest.resting(False) - rest.resting(True)) / 1e9
        chunk = found.plan.loss_chunk
        return Point("whole", *found.worst, loss_chunk=chunk, way=way, limit_gb=limit_gb)

    def _measure(self, ways: list[Way]) -> None:
        """Measure these ways; from the whole model where activations can't be stored."""
        case = self.case
        longest, manifest, kind = case.work.longest, case.manifest, case.kind
        points = agenda.first(case.settings, manifest, longest, kind, self.whole_table)
        if self.whole_table:
            points += agenda.parts(self._freed(), longest, kind)
        points += [p for way in ways for p in agenda.layers(manifest, longest, kind, way)]
        survey = self.surveyor.ask(points)
        if self.cached and not any(x.point.way.cached for x in survey.of("layers")):
            self.cached = False
            self._measure([replace(way, cached=False) for way in ways])
            return
        self._predict(survey)

    def _predict(self, survey: Survey) -> None:
        """All candidates from a survey; none where no way could be measured."""
        self.model = Model(survey)
        self.all = candidates.every(self.case, self.model)

    def _ways(self, more: bool) -> list[Way]:
        """Ways to measure: those that keep most, or all that the settings leave open.

        On the CPU blocks save time as well as memory, since a causal block sees no later keys:
        there attention in one piece is only measured for the table, or where settings want it.
        """
        settings = self._freed() if self.whole_table else self.case.settings
        k = rule.recompute_fixed(settings.memory.grad_checkpoint)
        some = (0, 1) if more or (k or 0) > 1 else (k or 0,)
        ks = (k,) if k in (0, 1) else some
        blocks = agenda.blocks(settings.memory, self.case.kind, self.case.work.longest)
        inside = sorted({block > 0 for block in blocks})
        if not self.whole_table and len(inside) > 1:
            inside = [True] if self.case.kind == "cpu" else inside if more else [False]
        return [Way(k, attention_block=int(b), cached=self.cached) for b in inside for k in ks]

    def _freed(self) -> Settings:
        """The settings with nothing fixed that the planner would choose."""
        return fixed.freed(self.case.settings, *fixed.chosen_by_hand(self.case.settings))

    def costs(self, best: Candidate) -> list[str]:
        """What fixed settings cost."""
        return list(fixed.costs(self.case, self.model, best, self._best_of))

    def _best(self) -> Candidate | None:
        """The best of all."""
        return self._best_of(self.all)

    def _best_of(self, found: list[Candidate]) -> Candidate | None:
        """The fastest that fits; of equally fast ones the smallest."""
        fitting = [candidate for candidate in found if self._fits(candidate)]
        if not fitting:
            return None
        seconds = lambda candidate: candidate.total_seconds(self.case.work.updates)
        least = min(map(seconds, fitting))
        return min(
            (candidate for candidate in fitting if seconds(candidate) <= SAME_SPEED * least),
            key=lambda candidate: (candidate.bytes, seconds(candidate)),
        )

    def _fits(self, found: Candidate) -> bool:
        needed = refusal.needs(self.case, self._as_measured(found))
        return needed <= self.case.limit.bytes and not self._died(found)

    def _died(self, found: Candidate) -> bool:
        """Whether a whole step of this way, not larger than the candidate's worst, was fatal."""
        size = found.worst.rows * found.worst.width
        return any(
            reading.died and point.rows * point.width <= size
            for point, reading in self.model.survey.readings.items()
            if point.kind == "whole" and point.way == self.worst_point(found).way
        )

    def _confirmed(self) -> Candidate:
        """The best one whose worst micro-batch was run, which corrects the predictions.

        Raises:
            UserError: Nothing fits.
        """
        for _ in range(MOST_CONFIRMED):
            best = self._best() or self._best_of_more()
            if best is None:
                break
            self._predict(self.surveyor.ask([self.worst_point(best)]))
            corrected = next(found for found in self.all if found.plan == best.plan)
            if self.measured(corrected) is not None and self._fits(corrected):
                return corrected
        best = self._best()
        if best is None:
            raise refusal.refused(self.case, self.model, self._nearly())
        return best

    def _nearly(self) -> list[Candidate]:
        """What a refusal chooses its closest plan from, that one as measured where it is small.

        A step that takes more than half of what is free is not run: it could push others out.
        """
        for _ in range(MOST_CONFIRMED):
            left = [self._as_measured(found) for found in self.all if not self._died(found)]
            if not left:
                return self.all
            closest = refusal.closest(left)
            known = self.measured(closest) is not None or self.case.kind != "cpu"
            if known or closest.bytes > limits.available() / 2:
                break
            self._predict(self.surveyor.ask([self.worst_point(closest)]))
        return left

    def _as_measured(self, found: Candidate) -> Candidate:
        """The candidate with what its worst micro-batch really took, where that was run."""
        step = self.measured(found)
        return found if step is None else replace(found, step=step)

    def _best_of_more(self) -> Candidate | None:
        """The best one once all ways are measured."""
        self._measure(self._ways(more=True))
        return self._best()


def cache_limit_gb(settings: Settings, found: Candidate, limit: Budget) -> float:
    """What the allocator may keep: as much as a step takes, where the budget has room for it."""
    if settings.memory.cache_limit_gb != "auto":
        return float(settings.memory.cache_limit_gb)
    return max(0.0, min(found.transient, limit.bytes - found.step)) / 1e9
