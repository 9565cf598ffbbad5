"""The process that dvc starts: holds the run's lock, starts the working child, passes signals on.

It imports no MLX, so it lives when the child is killed for memory, and can say so. It ends, and
ends the child, when the process that asked for the work is gone: DVC forwards no signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stages.core import files
from stages.core.config.settings import Settings
from stages.core.errors import RunFailed, UserError
from stages.core.machine import parent
from stages.core.machine.lock import locked
from stages.train.identity import checkpoints, run_fingerprint

VALIDATED = Path("reports/validate.json")
WAIT_S = 5.0
"""How long to wait for another process on the same run: an orphan ends within 2 s."""
GRACE_S = 1.0
"""Time for the child to write a checkpoint once dvc is gone."""


def run(settings: Settings, overrides: Sequence[str]) -> int:
    """Train in a child process and give its exit status.

    Args:
        settings: Of this run.
        overrides: `memory.*` and `run.*` words of the command line, passed on.

    Raises:
        UserError: Validation found errors, or another process trains this very run.
        RunFailed: The child was killed.
    """
    require_validated()
    folder = checkpoints(run_fingerprint(settings))
    with locked(folder / "lock", "this run's checkpoints", WAIT_S):
        return Supervisor(overrides).wait()


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
    """Starts the child and waits for it."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.asked: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        self._child: subprocess.Popen | None = None
        command = [sys.executable, "-m", "stages.train", f"--child={os.getpid()}", *overrides]
        self._child = subprocess.Popen(command)
        if self.asked is not None:
            self._child.send_signal(self.asked)
        if "DVC_STAGE" in os.environ:
            # By hand a run may outlive its shell (nohup), as any other program.
            parent.watch(self._abandoned, under_dvc=True)

    def wait(self) -> int:
        """The child's exit status; 130 or 143 where it ended early by a signal that was passed on.

        Raises:
            RunFailed: Something else killed it.
        """
        status = self._child.wait()
        if status and self.asked is not None:
            return 128 + self.asked
        if status >= 0:
            return status
        raise died(status)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.asked = number
        if self._child is not None:
            self._child.send_signal(number)

    def _abandoned(self) -> None:
        """dvc is gone: let the child write a checkpoint, then end it and this process."""
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(GRACE_S)
        self._child.kill()
        os._exit(128 + signal.SIGTERM)


def died(returncode: int) -> RunFailed:
    """What to say about a child that a signal ended (`returncode` is minus its number)."""
    name = signal.Signals(-returncode).name
    return RunFailed(
        "The training process was killed",
        found=name,
        expected="an exit of its own",
        fix="run again: training goes on from its last checkpoint"
        + ("; the system may have killed it for memory" if name in ("SIGKILL", "SIGSEGV") else ""),
    )
