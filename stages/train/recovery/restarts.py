"""What follows a child's end: its status, a smaller plan, the same plan again, or giving up.

A child that died goes on from the last checkpoint. Smaller plans come to an end by themselves; the
same plan is tried again a few times only, unless a new checkpoint shows that the run gets on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stages.core import console
from stages.core.errors import RunFailed
from stages.core.memory import limits, recovery
from stages.core.memory.marker import left_behind
from stages.core.memory.plan import Plan
from stages.core.memory.recovery import Death, Marker
from stages.train.recovery.ledger import STATUS, STEP, Ledger, handed_over, told

MOST_SAME, MOST_HANGS = 3, 1
"""Tries under the same plan without a new checkpoint in between."""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        status: Its exit status; minus a signal's number where one ended it.
        said: The last it wrote on stderr.
        asked: The signal that was passed on to it, None where nobody asked it to end.
        hung: It was ended here, since a step took too long.
    """

    status: int
    said: str = ""
    asked: int | None = None
    hung: bool = False


class Restarts:
    """All children of one start of the stage.

    Args:
        folder: Of the run's checkpoints.
        child: Runs one child to its end.
        limit_s: `run.step_timeout_s`, for the message.
    """

    def __init__(
        self, folder: Path, child: Callable[[], Ended], limit_s: float | None = None
    ) -> None:
        self.folder = folder
        self._child = child
        self._limit_s = limit_s
        self._same = 0
        self._newest = 0

    def run(self) -> int:
        """Start children until one ends by itself, or is asked to; gives the exit status.

        Raises:
            RunFailed: A child died, and another one would not help.
        """
        while True:
            left_behind(self.folder / STEP)  # of a start that was killed whole
            self._newest = newest_checkpoint(self.folder)
            kills = limits.oom_kills()
            ended = self._child()
            if ended.asked is not None and ended.status:
                return 128 + ended.asked
            found = self._cause(ended, kills)
            if found is None:
                return ended.status
            self._go_on(*found, ended.status)

    def _cause(self, ended: Ended, kills: int) -> tuple[Death, Marker | None] | None:
        """Why a child died, and in which step; None where it ended by itself."""
        marker = left_behind(self.folder / STEP)
        if ended.hung:
            reason = f"a step took longer than run.step_timeout_s={self._limit_s:g}"
            return Death("hang", reason, "same"), marker
        if ended.status == STATUS:
            return handed_over(self.folder)
        if ended.status >= 0:
            return None
        grown = limits.oom_kills() - kills
        return recovery.of_process(ended.status, marker, ended.said, grown), marker

    def _go_on(self, death: Death, marker: Marker | None, status: int) -> None:
        """Record the recovery, so that the next child finds its plan.

        Raises:
            RunFailed: There is nothing left to try.
        """
        ledger = Ledger(self.folder)
        if death.retry == "none":
            raise died(death, status)
        if ledger.plan is None:
            raise before_any_step(death)
        shape = (ledger.plan.batch_size, ledger.plan.widths[-1])
        if marker is not None:
            shape = (marker.rows, marker.width)
        after = ledger.next(*shape) if death.retry == "smaller" else ledger.plan
        gets_on = newest_checkpoint(self.folder) > self._newest
        if death.retry == "same":
            self._same = 1 if gets_on else self._same + 1
        if self._same > (MOST_HANGS if death.kind == "hang" else MOST_SAME):
            raise again_and_again(death)
        if after is None and not gets_on:
            raise gave_up(death, marker, ledger.plan)
        ledger.add(death, 0 if marker is None else marker.update, after or ledger.plan)
        console.warn(told(ledger.events[-1]))


def newest_checkpoint(folder: Path) -> int:
    """The update of the newest checkpoint, 0 where there is none."""
    names = [x.name for x in folder.iterdir() if x.is_dir() and x.name.isdigit()]
    return max(map(int, names), default=0)


def died(death: Death, status: int) -> RunFailed:
    """What to say of a death that memory does not explain."""
    name = signal.Signals(-status).name if status < 0 else f"status {status}"
    return RunFailed(
        f"The training process was ended by {name}",
        found=death.reason,
        expected="an exit of its own",
        fix="run again: training goes on from its last checkpoint",
    )


def before_any_step(death: Death) -> RunFailed:
    """What to say where not even the model could be loaded and checked."""
    return RunFailed(
        "The training process died before its first step",
        found=death.reason,
        expected=f"{limits.available() / 1e9:.2f} GB, which are free now, to be enough",
        fix="end other programs, or choose a smaller or a quantized model",
    )


def again_and_again(death: Death) -> RunFailed:
    """What to say after the last try under the same plan."""
    return RunFailed(
        "The training process died again and again, without a new checkpoint in between",
        found=death.reason,
        expected="the same step to go through when it is tried again",
        fix="see what ends it; then run again: training goes on from its last checkpoint",
    )


def gave_up(death: Death, marker: Marker | None, plan: Plan) -> RunFailed:
    """What to say after the smallest plan."""
    step = needed = limit = ""
    if marker is not None:
        step = f"update {marker.update}, micro-batches of up to {marker.rows} × {marker.width}"
        needed = f"about {marker.needed_bytes / 1e9:.2f} GB for a step; "
        limit = f"at most {(marker.limit_bytes or 0) / 1e9:.2f} GB"
    return RunFailed(
        "Out of memory, and there is no smaller plan",
        where=f"{step} tokens, recompute {plan.recompute}, attention blocks of"
        f" {plan.attention_block}, loss in pieces of {plan.loss_chunk}",
        found=f"{needed}{death.reason}",
        expected=limit,
        fix="end other programs, lower split.max_seq_length or train.num_layers, or take a"
        " quantized model; `python -m stages plan` has the numbers",
    )
