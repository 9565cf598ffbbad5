"""The process that dvc starts: holds the run's lock, starts the working child, passes signals on.

It imports no MLX, so it lives when the child is killed for memory, and starts another one (see
`stages.train.recovery.restarts`). It ends, and ends the child, when the process that asked for the
work is gone: DVC forwards no signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stages.core import files
from stages.core.config.settings import Settings
from stages.core.errors import UserError
from stages.core.machine import parent
from stages.core.machine.lock import locked
from stages.train.identity import checkpoints, run_fingerprint
from stages.train.recovery.ledger import STEP
from stages.train.recovery.relay import Relay
from stages.train.recovery.restarts import Ended, Restarts

VALIDATED = Path("reports/validate.json")
WAIT_S = 5.0
"""How long to wait for another process on the same run: an orphan ends within 2 s."""
GRACE_S = 1.0
"""Time for the child to write a checkpoint once dvc is gone."""
SECONDS_BETWEEN_LOOKS = 0.2
"""At a step under way, where its time is limited."""


def run(settings: Settings, overrides: Sequence[str]) -> int:
    """Train in a child process, in further ones where it dies, and give the exit status.

    Args:
        settings: Of this run.
        overrides: `memory.*` and `run.*` words of the command line, passed on.

    Raises:
        UserError: Validation found errors, or another process trains this very run.
        RunFailed: The child died, and another one would not help.
    """
    require_validated()
    folder = checkpoints(run_fingerprint(settings))
    with locked(folder / "lock", "this run's checkpoints", WAIT_S):
        limit_s = settings.run.step_timeout_s
        supervisor = Supervisor(child_command(settings, overrides), folder / STEP, limit_s)
        return Restarts(folder, supervisor.run, limit_s).run()


def child_command(settings: Settings, overrides: Sequence[str]) -> list[str]:
    """The command line of the process that works, or starts those that work."""
    role = "launch" if settings.run.launch.workers() > 1 else "child"
    return [sys.executable, "-m", "stages.train", f"--{role}={os.getpid()}", *overrides]


def require_validated() -> None:
    """Refuse to train what the validate stage did not pass.

    Raises:
        UserError: reports/validate.json is missing or lists errors.
    """
    report = files.read_json(VALIDATED)
    if not report.get("ok"):
        errors = [check for check in report.get("checks", []) if check.get("level") == "error"]
        raise UserError(
            "The validate stage found errors",
            where=str(VALIDATED),
            found="; ".join(check["message"] for check in errors),
            fix="mend them and run `dvc repro`",
        )


class Supervisor:
    """Starts children, one after the other, and waits for each.

    Args:
        command: Of a child.
        step: The file that says that a step is under way.
        limit_s: Longest a step may take, None for any time.
    """

    def __init__(self, command: Sequence[str], step: Path, limit_s: float | None = None) -> None:
        self._command = command
        self._step = step
        self._limit_s = limit_s
        self._asked: int | None = None
        self._child: subprocess.Popen | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def run(self) -> Ended:
        """Start a child and wait for its end."""
        relay = Relay()
        watched = self._child is not None
        self._child = subprocess.Popen(self._command, stderr=relay.child_end)
        relay.start()
        if self._asked is not None:
            self._child.send_signal(self._asked)
        if "DVC_STAGE" in os.environ and not watched:
            # By hand a run may outlive its shell (nohup), as any other program.
            parent.watch(self._abandoned, under_dvc=True)
        hung = self._wait()
        return Ended(self._child.returncode, relay.said(), self._asked, hung)

    def _wait(self) -> bool:
        """Until the child has ended; whether that was done here, for a step that hung."""
        if self._limit_s is None:
            self._child.wait()
            return False
        seen, since = None, 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(SECONDS_BETWEEN_LOOKS)
                return False
            now, beat = time.monotonic(), self._beat()  # a clock that stands still in sleep
            if beat != seen:
                seen, since = beat, now
            elif beat is not None and now - since > self._limit_s and self._asked is None:
                self._end()
                return True

    def _beat(self) -> int | None:
        """When the step under way last said that it goes on, None where none is."""
        try:
            return self._step.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _end(self) -> None:
        """End the child; it may write a checkpoint first, if it still can."""
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(GRACE_S)
        self._child.kill()
        self._child.wait()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        if self._child is not None:
            self._child.send_signal(number)

    def _abandoned(self) -> None:
        """dvc is gone: end the child, then this process."""
        self._end()
        os._exit(128 + signal.SIGTERM)
