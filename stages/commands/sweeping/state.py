"""Where each point of a sweep stands: one small file per point, written by whoever runs it.

The command that shows the sweep reads them, and so does the next one that continues it: points may
run in other processes or on other hosts that share the project's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stages.core import files
from stages.core.errors import UserError

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
ENDED = (DONE, FAILED, STOPPED)
SECONDS_BETWEEN_LOOKS = 0.05


@dataclass
class State:
    """One point.

    Attributes:
        key, label: As in `points.Point`.
        values: Key → value of what it overrides.
        state: `waiting`, `running`, `done`, `failed` or `stopped`.
        experiment: Name of its experiment.
        stage: The stage that runs now.
        note: The last line that stage printed.
        started: Seconds since 1970.
        seconds: From start to end, of the run that finished it.
        metrics: metrics.json once done.
        reason: Why it failed.
        log: The file that holds its output.
    """

    key: str
    label: str
    values: dict[str, Any] = field(default_factory=dict)
    state: str = WAITING
    experiment: str = ""
    stage: str = ""
    note: str = ""
    started: float = 0.0
    seconds: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    log: str = ""


def keep(folder: Path, state: State) -> None:
    """Write a point's state."""
    files.write_json(_file(folder, state.key), asdict(state))


def read(folder: Path, key: str) -> State | None:
    """A point's state, None where it has none."""
    try:
        return State(**files.read_json(_file(folder, key)))
    except (UserError, TypeError):
        return None


def all_states(folder: Path) -> list[State]:
    """The states of all points that a folder knows."""
    found = (read(folder, file.stem) for file in sorted((folder / "points").glob("*.json")))
    return [state for state in found if state is not None]


def _file(folder: Path, key: str) -> Path:
    return folder / "points" / f"{key}.json"


@contextlib.contextmanager
def alone(file: Path, gone: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Hold a lock of the operating system, and give a function that lets go of it early.

    Args:
        file: The lock file, made if missing.
        gone: Asked while waiting; once it is true `InterruptedError` is raised.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)

    def let_go() -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)

    try:
        while not _taken(handle):
            if gone():
                raise InterruptedError
            time.sleep(SECONDS_BETWEEN_LOOKS)
        yield let_go
    finally:
        os.close(handle)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until_free(folder: Path, most_s: float) -> None:
    """Wait until no process holds the lock of a point, at most `most_s` seconds."""
    end = time.monotonic() + most_s
    for file in sorted((folder / "points").glob("*.lock")):
        with (
            contextlib.suppress(InterruptedError),
            alone(file, lambda: time.monotonic() > end),
        ):
            pass
