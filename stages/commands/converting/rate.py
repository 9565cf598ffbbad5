"""mlx-lm's `lr_schedule` in the words of `train.schedule`.

mlx-lm counts in optimizer steps; people who accumulate write iterations, and reach the top rate
at the end of the run. Here iterations are divided by the accumulation steps, as `iters` is.

A schedule of D updates after a warm-up of W ends at update D + 1 (+ W + 1), see
`stages.core.update.schedule`. One that is longer than the run is kept by `train.stop_at_update`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.commands.converting.given import Given, as_number, refuse_unknown, wrong
from stages.commands.converting.keys import VERSION
from stages.core.errors import UserError

NAMES = {"cosine_decay": "cosine", "linear_schedule": "linear"}
KEYS = ("name", "arguments", "warmup", "warmup_init")
SLACK = 2
"""Updates that a schedule may end beside the run's end and still mean just that."""


@dataclass(frozen=True)
class Rate:
    """The learning rate of a run.

    Attributes:
        name, top, warmup, end: As in `train.schedule` and `train.learning_rate`.
        updates: Length of the schedule.
        stop: The update the run ends at, where that is before the schedule's end.
        notes: What a person should know.
    """

    name: str
    top: float
    warmup: int
    end: float
    updates: int
    stop: int | None
    notes: tuple[str, ...] = ()


def convert(given: Given, accumulation: int, updates: int) -> Rate:
    """The rate of a run of `updates`.

    Raises:
        UserError: The schedule is one that mlx-lm has and this project has not, or is no schedule.
    """
    if not given.said("lr_schedule"):
        return Rate("constant", given.number("learning_rate"), 0, 0.0, updates, None)
    schedule = given.group("lr_schedule")
    refuse_unknown("lr_schedule.", schedule, KEYS, "lr_schedule")
    name, top, steps, end = _arguments(schedule)
    warmup_steps = _steps("lr_schedule.warmup", schedule.get("warmup") or 0)
    notes = _notes(given, schedule, accumulation)
    decay = max(1, round(steps / accumulation))
    warmup = max(1, round(warmup_steps / accumulation)) if warmup_steps else 0
    whole = decay + 1 + (warmup + 1 if warmup else 0)
    if whole > updates + SLACK:
        notes.append(
            f"the decay ends at update {whole}, the run at {updates}: train.updates is the"
            f" schedule's length, train.stop_at_update the run's; train.updates={updates} with"
            " train.stop_at_update=null would decay to the end of the run"
        )
        return Rate(name, top, warmup, end, whole, updates, tuple(notes))
    if whole < updates - SLACK and end == 0:
        notes.append(
            f"mlx-lm goes on to update {updates} at rate 0, which changes nothing: ends at {whole}"
        )
        return Rate(name, top, warmup, end, whole, None, tuple(notes))
    if whole < updates - SLACK:
        notes.append(
            f"NOT THE SAME: mlx-lm stays at {end:g} from update {whole} on; here the decay lasts to"
            f" the last update, {updates}"
        )
    elif whole != updates:
        notes.append(f"the decay ends with the run; mlx-lm's would end at update {whole}")
    return Rate(name, top, warmup, end, updates, None, tuple(notes))


def _arguments(schedule: dict[str, Any]) -> tuple[str, float, int, float]:
    """Our name, top rate, steps of the decay, end."""
    name, given = schedule.get("name"), schedule.get("arguments")
    if name not in NAMES:
        raise UserError(
            "train.schedule has no such schedule",
            where="lr_schedule.name",
            found=name,
            expected=", ".join(NAMES),
            fix="choose one of these in the file, or leave lr_schedule out",
        )
    sizes = (2, 3) if name == "cosine_decay" else (3,)
    form = "[rate, steps, end]" if name == "cosine_decay" else "[rate, end, steps]"
    if not isinstance(given, list) or len(given) not in sizes:
        raise wrong("lr_schedule.arguments", given, form)
    top = as_number("lr_schedule.arguments", given[0])
    if name == "cosine_decay":
        steps, end = given[1], given[2] if len(given) == 3 else 0.0
    else:
        end, steps = given[1:]
    steps = _steps("lr_schedule.arguments", steps, least=1)
    return NAMES[name], top, steps, as_number("lr_schedule.arguments", end)


def _steps(key: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise wrong(key, value, f"steps, at least {least}")
    if value != int(value):
        raise wrong(key, value, "a whole number of steps")
    return int(value)


def _notes(given: Given, schedule: dict[str, Any], accumulation: int) -> list[str]:
    notes = []
    if given.said("learning_rate"):
        notes.append("learning_rate is ignored by mlx-lm beside lr_schedule")
    if accumulation > 1:
        notes.append(
            f"read as iterations, / {accumulation} = updates; mlx-lm {VERSION} counts these numbers"
            " in updates, so that its schedule lasts longer than its run"
        )
    if schedule.get("warmup") and schedule.get("warmup_init"):
        notes.append(f"the warm-up starts at 0, not at {schedule['warmup_init']:g}")
    return notes
