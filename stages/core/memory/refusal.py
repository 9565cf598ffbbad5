"""What to say when nothing fits: the closest plan, what is missing, what would help most.

A change of mathematics is only ever proposed, with its price, never made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stages.core.config.settings import Settings
from stages.core.errors import UserError
from stages.core.memory.budget import Budget
from stages.core.memory.candidates import RESERVE, SOFT, THROTTLED_BYTES, Candidate, Case
from stages.core.memory.fit import Model, Shape
from stages.core.memory.words import enough, size
from stages.core.memory.work import Work
from stages.core.model.manifest import Manifest

FOUR_BIT = 4.5 / 8
"""Bytes per weight of a 4-bit base with group size 64, scales and biases included."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STEP = 16


class Help(NamedTuple):
    """A change of mathematics.

    Attributes:
        saves: Bytes.
        text: How it is made and paid for.
        alone: It saves them whenever most is needed, so it can be enough by itself.
    """

    saves: float
    text: str
    alone: bool = True


def closest(found: Sequence[Candidate]) -> Candidate:
    """The candidate that needs least."""
    return min(found, key=lambda candidate: (candidate.bytes, candidate.step))


def needs(case: Case, found: Candidate) -> float:
    """Bytes that the budget must hold: the highest moment, and the allocator's cache."""
    cache = case.settings.memory.cache_limit_gb
    if cache == "auto":
        return found.bytes
    return max(found.start, found.step + float(cache) * 1e9)


def refused(case: Case, model: Model, found: Sequence[Candidate]) -> UserError:
    """The error that says so with numbers; the change that would help most comes first."""
    limit, least = case.limit, closest(found)
    least_bytes = needs(case, least)
    missing = least_bytes - limit.bytes
    short = f"{size(missing)} more" if missing > 0 else f"but a step died: {_reason(model)}"
    plan, needed = least.plan, size(least_bytes)
    soft = 0.0 if plan.memory_limit_gb is None else SOFT * least.transient
    other = ", or change the mathematics, what helps most first:"
    words = "".join(_lines(changes(case, model, least), missing))
    return UserError(
        "No plan fits the memory budget",
        where="memory.budget_gb",
        found=f"budget {size(limit.bytes)} ({limit.reason}); the closest plan needs"
        f" {needed}, {short}: {plan.batch_size} rows or"
        f" {plan.batch_tokens} tokens at once, {least.way.told()}, loss in pieces of"
        f" {plan.loss_chunk or 'all'}{_when(least)}",
        expected=f"at least {needed}, or other mathematics",
        fix=f"raise memory.budget_gb to {enough(least_bytes + soft)}" + (words and other + words),
    )


def _at_start(found: Candidate) -> bool:
    """Whether most memory is needed before the first update."""
    return found.start >= found.bytes


def _when(found: Candidate) -> str:
    if not _at_start(found):
        return ""
    return (
        f"; that much before the first update, when the whole model is checked"
        f"{' and its frozen layers are run' if found.plan.activation_cache else ''},"
        f" an update needs {size(found.step)}"
    )


def _lines(helps: Sequence[Help], missing: float) -> Iterator[str]:
    for help_ in sorted(helps, reverse=True):
        alone = ", enough by itself" if help_.alone and help_.saves >= missing > 0 else ""
        yield f"\n    {help_.text} (saves about {size(help_.saves)}{alone})"


def _reason(model: Model) -> str:
    """Of what a whole step died."""
    readings = model.survey.readings.values()
    return next((x.died for x in readings if x.died and x.point.kind == "whole"), "unknown")


def changes(case: Case, model: Model, closest: Candidate) -> list[Help]:
    """What a change of mathematics would save, for each that is possible here."""
    found = [_shorter(case.work, model, closest, case.limit), _fewer_layers(model, closest)]
    found += [_lower_rank(case.settings, model)]
    others = [help_ for help_ in found if help_ is not None and help_.saves > 0]
    fewer_bytes = [help_ for help_ in [_quantized(case.manifest, model, closest)] if help_]
    if not _at_start(closest):
        return others + fewer_bytes
    # They make an update smaller, not what comes before the first one.
    in_updates = [help_._replace(alone=False) for help_ in others]
    return fewer_bytes + (in_updates if closest.step > case.limit.bytes else [])


def longest_that_fits(model: Model, closest: Candidate, limit: Budget, longest: int) -> int:
    """The longest example up to `longest`, in tokens, of which one at a time fits; 0 for none."""
    widths = np.arange(STEP, longest + 1, STEP)
    shape = Shape(np.ones_like(widths), widths, widths)
    peaks = model.peak(closest.way, shape, closest.plan.loss_chunk) * _held_back(closest)
    needed = model.survey.rest.resting(closest.way.cached) + (1 + RESERVE) * peaks
    fits = widths[needed <= limit.bytes]
    return int(fits.max(initial=0))


def _held_back(found: Candidate) -> float:
    """Share of a step's peak that is left where MLX may not run ahead."""
    return 1.0 if found.plan.memory_limit_gb is None else THROTTLED_BYTES


def _shorter(work: Work, model: Model, closest: Candidate, limit: Budget) -> Help | None:
    fits = longest_that_fits(model, closest, limit, work.longest - STEP)
    cap = fits or max(STEP, work.longest // 2)
    cut = np.minimum(work.targets, np.maximum(0, work.lengths - cap)).sum()
    share = cut / max(1, work.targets.sum())
    shape = Shape(1, cap, cap)
    peak = model.peak(closest.way, shape, closest.plan.loss_chunk) * _held_back(closest)
    saved = closest.transient - peak
    fate = "the longest that fits" if fits else "still too long"
    recurrent = model.survey.rest.recurrent
    why = f"; {recurrent} layers keep a state for every token" if recurrent else ""
    text = (
        f"split.max_seq_length={cap}, {fate}: {share:.1%} of the targets lie beyond it, cut off or"
        f" trained in pieces, as split.policy says{why}"
    )
    return Help(saved, text)


def _fewer_layers(model: Model, closest: Candidate) -> Help | None:
    rest = model.survey.rest
    trained = rest.layers - rest.cut
    fewer = trained // 2
    if fewer < 1:
        return None
    shape, way = closest.worst, closest.way
    kept = model.kept(way, shape) * (trained - fewer) / trained
    state = (rest.trained + rest.state) * (trained - fewer) / trained
    weights = (rest.above - rest.trained) * (trained - fewer) / rest.layers if way.cached else 0
    text = (
        f"train.num_layers={fewer}: quality can fall on tasks that need much new knowledge;"
        " compare validation losses"
    )
    return Help(kept + state + weights, text)


def _quantized(manifest: Manifest, model: Model, closest: Candidate) -> Help | None:
    if manifest.quantization:
        return None
    rest = model.survey.rest
    stays = rest.above if closest.way.cached and not _at_start(closest) else rest.whole
    weights = stays - rest.trained
    saved = weights * (1 - FOUR_BIT / BYTES[manifest.dtype])
    text = "a 4-bit version of the base model (QLoRA): its losses differ slightly from the start"
    return Help(saved, text)


def _lower_rank(settings: Settings, model: Model) -> Help | None:
    rank = settings.train.lora_parameters.rank
    if settings.train.fine_tune_type == "full":
        saved = 0.95 * (model.survey.rest.state + model.survey.rest.trained)
        return Help(saved, "train.fine_tune_type=lora: fewer numbers to train")
    if rank == 1:
        return None
    saved = (model.survey.rest.state + model.survey.rest.trained) * (1 - (rank // 2) / rank)
    return Help(saved, f"train.lora_parameters.rank={rank // 2}: a smaller adapter")
