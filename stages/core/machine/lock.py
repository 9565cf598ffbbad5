"""One process per thing: a lock of the operating system, gone when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from stages.core import console
from stages.core.errors import UserError


@contextlib.contextmanager
def locked(file: Path, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on `file` (made if missing) for the block.

    Args:
        file: The lock file; it stays, only the lock on it goes.
        what: What is locked, for the message ("this run's checkpoints").
        wait_s: How long to wait for another holder, with one line that says so.

    Raises:
        UserError: Another process still holds it; its process id is named.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(handle, what, wait_s)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _acquire(handle: int, what: str, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
        if time.monotonic() >= end:
            raise UserError(
                f"Another process works on {what}",
                found=f"process {holder}",
                fix=f"wait for it to end, or end it (`kill {holder}`), then run again",
            )
        if not told:
            console.say(f"waiting for process {holder}, which works on {what}")
            told = True
        time.sleep(0.2)
