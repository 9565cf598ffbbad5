"""What the `memory.*` values that a person fixed cost, beside what would be chosen without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from stages.core.config.settings import Settings
from stages.core.memory import candidates
from stages.core.memory.candidates import Candidate, Case
from stages.core.memory.fit import Model
from stages.core.memory.words import size

KEYS = (
    "batch_size",
    "grad_accumulation_steps",
    "grad_checkpoint",
    "loss_chunk",
    "attention_block",
    "activation_cache",
)
"""Settings that the planner would choose."""
SAME = 0.01
"""Differences below this share are none."""


def freed(settings: Settings, *keys: str) -> Settings:
    """The settings with these `memory.*` keys at `auto`."""
    memory = replace(settings.memory, **dict.fromkeys(keys, "auto"))
    return replace(settings, memory=memory)


def chosen_by_hand(settings: Settings) -> list[str]:
    """Keys of KEYS that are fixed."""
    return [key for key in KEYS if getattr(settings.memory, key) != "auto"]


def costs(
    case: Case, model: Model, chosen: Candidate, best: Callable[[list[Candidate]], Candidate | None]
) -> Iterator[str]:
    """One line for each fixed key: what it costs and saves beside `auto`, all others as they are.

    Args:
        chosen: The plan with all of them.
        best: The one of several candidates that would be chosen.
    """
    for key in chosen_by_hand(case.settings):
        free = replace(case, settings=freed(case.settings, key))
        found = best(candidates.every(free, model))
        if found is not None:
            name = f"memory.{key}={written(getattr(case.settings.memory, key))}"
            yield f"{name} is fixed: {compared(chosen, found, case.work.updates)}"


def compared(chosen: Candidate, free: Candidate, updates: int) -> str:
    """A plan beside the one that would be chosen: time of an update, memory."""
    mine, other = (found.total_seconds(updates) / updates for found in (chosen, free))
    slower, more = mine - other, chosen.step - free.step
    words = []
    if abs(slower) > SAME * other:
        words.append(f"{abs(slower):.2f} s an update {'slower' if slower > 0 else 'faster'}")
    if abs(more) > SAME * free.step:
        words.append(f"{size(abs(more))} {'more' if more > 0 else 'less'}")
    if not words:
        return "no dearer than auto"
    return f"{' and '.join(words)} than auto, which would be {told(free)}"


def told(found: Candidate) -> str:
    """What a candidate would do."""
    plan = found.plan
    stored = ", frozen layers stored" if plan.activation_cache else ""
    return (
        f"{plan.batch_size} rows or {plan.batch_tokens} tokens at once, {found.way.told()}{stored},"
        f" loss in pieces of {plan.loss_chunk or 'all'}"
    )


def written(value: Any) -> str:
    """A value as it stands in the settings."""
    return str(value).lower() if isinstance(value, bool) else str(value)
