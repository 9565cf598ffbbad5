"""The recoveries of a run: which plan is in force, which ones failed, what happened.

One file in the checkpoint folder, `recovery.json`: written by the working child, and by the
supervisor once the child is dead. It is no output of the stage, and goes with the checkpoints.
No MLX here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core import files
from stages.core.errors import UserError
from stages.core.memory import recovery
from stages.core.memory.plan import Plan, from_record
from stages.core.memory.recovery import Death, Marker

FILE, STEP, HANDED_OVER = "recovery.json", "step.json", "handed_over.json"
"""The ledger, the note of the step under way, and why a child gave its work back."""

STATUS = 75
"""A child's exit status when it hands its work over (EX_TEMPFAIL of sysexits.h: try again)."""


class HandOver(Exception):
    """This process cannot go on, a fresh one may.

    Args:
        death: Why.
        marker: The step that failed, None where none was under way.
    """

    def __init__(self, death: Death, marker: Marker | None) -> None:
        super().__init__(death.reason)
        self.death = death
        self.marker = marker


@dataclass
class Ledger:
    """What `recovery.json` holds.

    Attributes:
        folder: Of the run's checkpoints.
        plan: In force, None before the first session of the run.
        machine: Device and memory settings it was made for; see `Store.machine`.
        smaller: It came of a recovery, so it wins over a checkpoint's plan and a new one.
        failed: Plans that ran out of memory on this machine.
        events: One entry for each recovery, for run.json.
    """

    folder: Path
    plan: Plan | None = None
    machine: dict[str, Any] | None = None
    smaller: bool = False
    failed: list[Plan] | None = None
    events: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.failed, self.events = [], []
        try:
            record = files.read_json(self.folder / FILE)
            self.plan = from_record(record["plan"])
            self.machine, self.smaller = record["machine"], record["smaller"]
            self.failed = [from_record(entry) for entry in record["failed"]]
            self.events = record["events"]
        except (UserError, KeyError, TypeError):
            return  # there was no session yet, or it was of another version

    def plan_for(self, machine: dict[str, Any]) -> Plan | None:
        """The plan of the last recovery, None where there was none on such a machine."""
        return self.plan if self.smaller and _same(machine, self.machine) else None

    def begin(self, asked: Plan, plan: Plan, machine: dict[str, Any]) -> None:
        """Note the plan of a session that starts.

        Args:
            asked: What the session was to use.
            plan: What is left of it after the check.
            machine: As in `plan_for`.
        """
        if not _same(machine, self.machine):
            self.smaller, self.failed = False, []
        elif self.smaller and asked != plan:
            self.failed.append(recovery.unpredicted(asked))  # never to be asked for again
        self.plan, self.machine = plan, machine
        self._write()

    def next(self, rows: int, width: int) -> Plan | None:
        """The next smaller plan after a micro-batch of this shape failed, None after the last."""
        failed = [*self.failed, recovery.unpredicted(self.plan)]
        return recovery.next_smaller(self.plan, rows, width, failed)

    def add(self, death: Death, update: int, after: Plan) -> None:
        """Record a recovery; `after` is the plan to go on with, perhaps the same."""
        self.events.append(recovery.event(death, update, self.plan, after))
        if death.retry == "smaller" and after != self.plan:
            self.failed.append(recovery.unpredicted(self.plan))
            self.plan, self.smaller = after, True
        self._write()

    def clear(self) -> None:
        """The run is through."""
        for name in (FILE, STEP, HANDED_OVER):
            (self.folder / name).unlink(missing_ok=True)

    def _write(self) -> None:
        record = {
            "plan": self.plan.record(),
            "machine": self.machine,
            "smaller": self.smaller,
            "failed": [plan.record() for plan in self.failed],
            "events": self.events,
        }
        files.write_json(self.folder / FILE, record)


def hand_over(folder: Path, error: HandOver) -> None:
    """Leave word for the supervisor: why, and at which step."""
    marker = None if error.marker is None else error.marker.record()
    record = {"death": vars(error.death), "marker": marker}
    files.write_json(folder / HANDED_OVER, record)


def handed_over(folder: Path) -> tuple[Death, Marker | None]:
    """What a child left that ended with `STATUS`; it is removed.

    Raises:
        UserError: It left nothing.
    """
    record = files.read_json(folder / HANDED_OVER)
    (folder / HANDED_OVER).unlink()
    marker = None if record["marker"] is None else Marker(**record["marker"])
    return Death(**record["death"]), marker


def told(event: dict[str, Any]) -> str:
    """A recovery in one line for the console."""
    changed = [f"{name} {old} → {new}" for name, (old, new) in event["changed"].items()]
    then = "again with " + ", ".join(changed) if changed else "again with the same plan"
    place = f"update {event['update']}" if event["update"] else "before the first update"
    return f"{place}: {event['reason']}; {then}, the effective batch stays"


def _same(now: dict[str, Any], then: dict[str, Any] | None) -> bool:
    """Whether two machines' facts are equal, threads aside: memory does not hang on those."""
    strip = lambda facts: {name: value for name, value in facts.items() if name != "threads"}
    return then is not None and strip(now) == strip(then)
