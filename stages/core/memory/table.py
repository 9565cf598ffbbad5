"""A choice as rows for a person and as JSON: what each setting saves, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stages.core.memory import candidates
from stages.core.memory.candidates import Candidate
from stages.core.memory.choose import Choice
from stages.core.memory.fit import Model, Shape
from stages.core.memory.plan import Plan
from stages.core.memory.points import Way
from stages.core.memory.refusal import longest_that_fits
from stages.core.memory.words import size
from stages.core.memory.work import Work

PIECES = 64
"""Targets per piece of the loss that other settings are compared at, where none is chosen."""
LONGEST = 1 << 20
"""Lengths above are not looked at."""


@dataclass(frozen=True)
class Row:
    """One setting alone, or the chosen plan.

    Attributes:
        name: Of the setting, for a person.
        peak_gb, seconds: Predicted, per update.
        saves_gb, costs_seconds: Beside the loss in pieces with no other setting.
        chosen: It is the chosen plan.
    """

    name: str
    peak_gb: float
    seconds: float
    saves_gb: float
    costs_seconds: float
    chosen: bool = False


def rows(choice: Choice) -> list[Row]:
    """The plain way, the loss in pieces, each other setting beside that, the chosen plan."""
    chosen, work = choice.chosen, choice.case.work
    load = work.load(chosen.plan)
    pieces = chosen.plan.loss_chunk or PIECES
    alone = candidates.planned(chosen.plan, _plain(choice.model, chosen), pieces)
    base = candidates.predict(alone, choice.model, load)
    plans = {"plain": replace(alone, loss_chunk=0), f"loss in pieces of {pieces}": alone}
    plans |= dict(_alone(choice, alone))
    found = [
        _row(name, candidates.predict(plan, choice.model, load), base)
        for name, plan in plans.items()
    ]
    largest = max(shape.rows * shape.width for shape in load.shapes)
    half = replace(alone, batch_tokens=largest // 2)
    if half.batch_tokens >= work.longest:
        smaller = candidates.predict(half, choice.model, work.load(half))
        found.append(_row(f"micro-batch of {half.batch_tokens} tokens", smaller, base))
    return [*found, replace(_row("chosen", chosen, base), chosen=True)]


def _plain(model: Model, chosen: Candidate) -> Way:
    """Keep everything, attention in one piece where that was measured."""
    whole = any(not inside for _, inside in model.ways())
    return Way(attention_block=0 if whole else chosen.way.attention_block)


def _alone(choice: Choice, base: Plan) -> Iterator[tuple[str, Plan]]:
    """Each setting alone: its name and the plan with it."""
    case, model = choice.case, choice.model
    if True in candidates.cached_choices(case, model):
        yield "frozen layers stored", replace(base, activation_cache=True)
    for way in candidates.ways(case, model):
        single = replace(way, cached=False)
        if (way.recompute > 0) != (way.attention_block > 0):
            yield single.told(), candidates.planned(base, single, base.loss_chunk)


def _row(name: str, found: Candidate, base: Candidate) -> Row:
    return Row(
        name=name,
        peak_gb=found.step / 1e9,
        seconds=found.seconds,
        saves_gb=(base.step - found.step) / 1e9,
        costs_seconds=found.seconds - base.seconds,
    )


def facts(choice: Choice) -> dict[str, str]:
    """What a person wants to know beside the rows: label → text."""
    chosen, plan, rest = choice.chosen, choice.plan, choice.model.survey.rest
    gb = lambda count: size(count, digits=3)
    count = variants(choice.case.work, plan)
    compiled = f"{count} compiled variants" if plan.compiled else "not compiled"
    found = {
        "budget": f"{size(choice.budget.bytes)}: {choice.budget.reason}",
        "weights": gb(rest.above if plan.activation_cache else rest.whole)
        + (f" (of {gb(rest.whole)}: the frozen ones are freed)" if plan.activation_cache else ""),
        "optimizer state and gradient": gb(rest.state),
        "a step on top": f"{gb(chosen.transient)}; worst micro-batch {chosen.worst.rows} ×"
        f" {chosen.worst.width} tokens, {chosen.worst.targets} targets",
        "peak": gb(chosen.step) + _measured(choice),
        "before the first update": gb(chosen.start),
        "allocator's cache": f"at most {gb(plan.cache_limit_gb * 1e9)}",
        "micro-batches": f"at most {plan.batch_size} rows, {plan.batch_tokens} padded tokens",
        "widths": f"{len(plan.widths)}: {', '.join(map(str, plan.widths))}; {compiled}",
        "longest example that fits": _longest(choice),
        "time": f"{chosen.seconds:.2f} s an update, {choice.case.work.updates} updates"
        + (f", once {chosen.start_seconds:.0f} s" if chosen.start_seconds else ""),
    }
    if plan.memory_limit_gb is not None:
        found["kept from running ahead"] = f"MLX waits above {gb(plan.memory_limit_gb * 1e9)}"
    if rest.recurrent:
        found["recurrent layers"] = _recurrent(choice.model, chosen)
    return found


def variants(work: Work, plan: Plan) -> int:
    """Shapes for which a compiled plan traces the step anew, of all updates that are looked at."""
    from stages.core.update.step import padded_targets  # it brings MLX

    shapes = work.shapes(plan)
    return len({(x.rows, x.width, padded_targets(x.targets, plan.loss_chunk)) for x in shapes})


def longest(choice: Choice) -> int:
    """The longest example, one at a time, that fits under the chosen way of computing."""
    return longest_that_fits(choice.model, choice.chosen, choice.budget, LONGEST)


def _longest(choice: Choice) -> str:
    found = longest(choice)
    return f"{found} tokens" if found < LONGEST else f"more than {LONGEST} tokens"


def _measured(choice: Choice) -> str:
    if choice.measured_worst is None:
        return ""
    return f" (its worst micro-batch was run: {size(choice.measured_worst, digits=3)})"


def _recurrent(model: Model, chosen: Candidate) -> str:
    """State per token, as measured: the rise of what is kept with length."""
    way = replace(_plain(model, chosen), cached=chosen.way.cached)
    rise = [float(model.kept(way, Shape(1, width, 1))) for width in (1, 2)]
    count = model.survey.rest.recurrent
    return (
        f"{count} of the trained layers; the layers keep {(rise[1] - rise[0]) / 1e6:.2f} MB a token"
    )


def record(choice: Choice) -> dict[str, Any]:
    """The choice as JSON-like values."""
    chosen, rest = choice.chosen, choice.model.survey.rest
    return {
        "plan": choice.plan.record(),
        "budget": {"gb": choice.budget.gb, "reason": choice.budget.reason},
        "predicted": {
            "peak_gb": chosen.step / 1e9,
            "start_gb": chosen.start / 1e9,
            "seconds_per_update": chosen.seconds,
            "start_seconds": chosen.start_seconds,
            "worst": chosen.worst._asdict(),
        },
        "measured_worst_gb": None if choice.measured_worst is None else choice.measured_worst / 1e9,
        "rest_gb": {
            "weights": rest.whole / 1e9,
            "weights_without_frozen": rest.above / 1e9,
            "optimizer_and_gradient": rest.state / 1e9,
        },
        "recurrent_layers": rest.recurrent,
        "longest_that_fits": longest(choice),
        "settings": [row.__dict__ for row in rows(choice)],
        "points_measured": choice.points,
        "seconds": choice.seconds,
        "notes": choice.notes,
    }


def curves(choice: Choice, lengths: list[int]) -> dict[str, list[float]]:
    """Peak in GB over the length of a single example, for ways of computing; for the chart."""
    model, plan = choice.model, choice.plan
    rest = model.survey.rest
    chosen = choice.chosen.way
    tried = {Way(): 0, Way(recompute=1): 64, chosen: plan.loss_chunk}
    fitted = model.ways()
    if {(1, True)} <= fitted:
        block = plan.attention_block or 128
        tried[Way(recompute=1, attention_block=block, cached=model.cached)] = 64
    found = {}
    for way, chunk in tried.items():
        if (way.recompute, way.attention_block > 0) not in fitted and way != chosen:
            continue
        stored = ", loss in one piece" if not chunk else ""
        stored += ", frozen layers stored" if way.cached else ""
        name = ("chosen: " if way == chosen else "") + way.told() + stored
        peaks = [float(model.peak(way, Shape(1, length, length - 1), chunk)) for length in lengths]
        found[name] = [(rest.resting(way.cached) + peak) / 1e9 for peak in peaks]
    return found
