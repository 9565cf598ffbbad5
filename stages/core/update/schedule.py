"""The learning rate of each update, by mlx-lm's own schedule functions, counted in updates.

As in mlx-lm (`mlx_lm.tuner.utils.build_schedule`) a warm-up of W updates starts at rate 0 and
reaches the full rate at update W + 1, counted from 1. The decay ends exactly at the last update of
the whole run, whatever `train.stop_at_update` says.
"""

from __future__ import annotations

from collections.abc import Callable

from stages.core.config import schema
from stages.core.errors import UserError

Rates = Callable[[int], float]
"""Updates done so far (0 before the first) → rate of the next one."""


def warmup_updates(schedule: schema.Schedule, updates: int) -> int:
    """Updates of the warm-up: `warmup` itself, or below 1 its share of the run, rounded.

    Raises:
        UserError: The warm-up is as long as the run or longer.
    """
    share = schedule.warmup < 1
    warmup = round(schedule.warmup * updates) if share else round(schedule.warmup)
    if warmup and warmup >= updates:
        raise UserError(
            "The warm-up is as long as the run",
            where="train.schedule.warmup",
            found=f"{warmup} updates of warm-up in a run of {updates}",
            expected=f"below {updates} updates, or a share below 1",
            fix="shorten the warm-up or train longer",
        )
    return warmup


def rates(train: schema.Train, updates: int) -> Rates:
    """The rate of every update of a run of `updates`.

    Raises:
        UserError: The warm-up is as long as the run or longer.
    """
    import mlx.core as mx
    from mlx_lm.tuner.utils import build_schedule

    schedule, top = train.schedule, train.learning_rate
    warmup = warmup_updates(schedule, updates)
    decay = max(1, updates - 1 - (warmup + 1 if warmup else 0))
    name, arguments = {
        "constant": ("linear_schedule", [top, top, 1]),
        "linear": ("linear_schedule", [top, schedule.end, decay]),
        "cosine": ("cosine_decay", [top, decay, schedule.end]),
    }[schedule.name]
    rate = build_schedule({"name": name, "arguments": arguments, "warmup": warmup})
    return lambda done: rate(mx.array(done, mx.uint64)).astype(mx.float32).item()


def line(train: schema.Train, updates: int) -> str:
    """The rates at the start, the end of the warm-up, the middle and the end, as one line."""
    rate = rates(train, updates)
    warmup = warmup_updates(train.schedule, updates)
    # Where marks fall together, the later of these lines names the update.
    marks = {updates - 1: "last", updates // 2: "middle", warmup: "end of warm-up", 0: "first"}
    shown = [f"{rate(done):.3g} at update {done + 1} ({marks[done]})" for done in sorted(marks)]
    return f"learning rate, {train.schedule.name}: " + ", ".join(shown)
