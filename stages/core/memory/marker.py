"""A note that a step is about to start: it outlives the process, and tells why that died.

    marker = StepMarker(folder / "step")
    with marker.around(update, rows, width, step_bytes):
        step.gradient(...)

Written once per update, for its largest micro-batch: about 0.1 ms on two cores, since the machine's
limits are looked up at most once a second. The file is not synced: only this machine's next process
reads it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from stages.core.memory import limits
from stages.core.memory.recovery import Marker

SECONDS_BETWEEN_LOOKS = 1.0


class StepMarker:
    """Writes the note before each step and removes it afterwards.

    Attributes:
        path: Of the file.
        last: The note written last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: Marker | None = None
        self._process = psutil.Process()
        self._looked = -SECONDS_BETWEEN_LOOKS
        self._headroom = (0, 0)

    @contextmanager
    def around(self, update: int, rows: int, width: int, step_bytes: int = 0) -> Iterator[None]:
        """Mark one step; an exception leaves no note, only a death does.

        Args:
            update: Its number, from 1.
            rows, width: Of its largest micro-batch.
            step_bytes: What the step is expected to take beside what is in use now.
        """
        used, limit = self._in_use()
        self.last = Marker(update, rows, width, used + step_bytes, limit)
        self.path.write_text(json.dumps(self.last.record()))
        try:
            yield
        finally:
            self.path.unlink(missing_ok=True)

    def beat(self) -> None:
        """Say that the step goes on: the file's time is what a watcher looks at."""
        with suppress(FileNotFoundError):
            os.utime(self.path)

    def _in_use(self) -> tuple[int, int]:
        """As `limits.headroom`, looked up at most once a second."""
        now = time.monotonic()
        if now - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked, self._headroom = now, limits.headroom(self._process)
        return self._headroom


def left_behind(path: Path) -> Marker | None:
    """The note of a process that died in a step, None where there is none; it is removed."""
    with suppress(OSError, ValueError, TypeError):
        note = Marker(**json.loads(path.read_text()))
        path.unlink()
        return note
    return None
