"""A note that a step is about to start: it outlives the process, and tells why that died.

    marker = StepMarker(folder / "step", plan)
    with marker.around(update, rows, width):
        step.gradient(...)

A few hundred microseconds a step: the file is not synced, since only this machine's next process
reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.core.memory import limits
from stages.core.memory.plan import Plan
from stages.core.memory.recovery import Marker


class StepMarker:
    """Writes the note before each step and removes it afterwards.

    Args:
        path: Of the file.
        plan: Its predicted peak tells how much a step needs; without one, as much as is in use.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.peak = int((plan.predicted_peak_gb or 0.0) * 1e9)

    @contextmanager
    def around(self, update: int, rows: int, width: int, active: int = 0) -> Iterator[None]:
        """Mark one step; an exception leaves no note, only a death does.

        Args:
            update: Its number, from 1.
            rows, width: Of the micro-batch.
            active: Bytes in MLX's arrays now.
        """
        used, limit = limits.headroom()
        needed = used + max(0, self.peak - active)
        note = Marker(update, rows, width, needed_bytes=needed, limit_bytes=limit)
        self.path.write_text(json.dumps(note.record()))
        try:
            yield
        finally:
            self.path.unlink(missing_ok=True)


def left_behind(path: Path) -> Marker | None:
    """The note of a process that died in a step, None where there is none; it is removed."""
    with suppress(OSError, ValueError, TypeError):
        note = Marker(**json.loads(path.read_text()))
        path.unlink()
        return note
    return None
