"""When to end early: a signal, or the process that asked for the work is gone.

Training looks at a flag between micro-batches, so that a signal never cuts through an update or a
file. A child whose parent is gone does the same, and ends at the latest one second after that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from stages.core.entry import Stopped
from stages.core.machine import parent

GRACE_S = 1.0
"""Time to write a checkpoint after the parent is gone; a big one is lost, the last one stays."""
PR_SET_PDEATHSIG = 1


class Stop:
    """Whether to end, and by which signal.

    Attributes:
        number: Of the signal, None where nobody asked.
        beat: Called at every look: a step goes on.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.beat: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Take SIGINT and SIGTERM as wishes from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._asked)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        self.number = number

    def check(self) -> None:
        """Raise `Stopped` when somebody has asked to end."""
        self.beat()
        if self.number is not None:
            raise Stopped(self.number)

    def with_parent(self, pid: int | None) -> None:
        """End with the process `pid`, this one's parent; None: with whoever is the parent now."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        parent.watch(self._orphaned, under_dvc=False, pid=pid)

    def _orphaned(self) -> None:
        self.number = signal.SIGTERM
        time.sleep(GRACE_S)
        os._exit(128 + signal.SIGTERM)
