"""Keep the activations within their limit: the least recently used folders go first.

Every process that builds or reads a folder holds a shared lock on `<folder>.use`; a folder that
somebody holds is never evicted. The system drops the lock when its holder dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.core import console, files
from stages.core.activations.size import RESERVE_GB, bytes_in, told


class Use:
    """A shared lock on a folder of activations, from the making of this object to `close`."""

    def __init__(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(_use_file(folder), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_SH)
        if folder.exists():
            os.utime(folder)

    def close(self) -> None:
        """Let it be evicted, as far as this holder goes."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def make_room(root: Path, need: int, limit_gb: float) -> str:
    """Evict until `need` more bytes fit the limit and the disk; nothing goes where that can't be.

    Args:
        root: `.cache/activations`. Hold a `Use` of what must stay.
        need: Bytes to be written.
        limit_gb: Most that all folders may take together.

    Returns:
        "", or why there is no room.
    """
    root.mkdir(parents=True, exist_ok=True)
    sizes = {entry: bytes_in(entry) for entry in root.iterdir() if entry.is_dir()}
    total = sum(sizes.values())
    free = files.free_gb(root) - RESERVE_GB
    excess = max(total + need - limit_gb * 1e9, need - free * 1e9)
    chosen: list[Path] = []
    for entry in sorted(sizes, key=_last_used):
        if excess <= 0:
            break
        if _unused(_final(entry)):
            chosen.append(entry)
            excess -= sizes[entry]
    if excess > 0:
        return (
            f"it needs {told(need)}; {max(0.0, free):.3g} GB of the disk may be used, and"
            f" {told(total)} of memory.activation_cache_limit_gb ({limit_gb:.3g}) are taken"
        )
    for entry in chosen:
        _evict(entry, sizes[entry])
    return ""


def _evict(entry: Path, size: int) -> None:
    with _exclusive(_final(entry)) as mine:
        if mine:
            shutil.rmtree(entry, ignore_errors=True)
            console.say(f"activations evicted, unused for longest: {entry.name}, {told(size)}")


def _unused(folder: Path) -> bool:
    with _exclusive(folder) as mine:
        return mine


@contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """Whether nobody uses the folder; nobody can begin to inside the block."""
    handle = os.open(_use_file(folder), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        mine = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(handle)


def _use_file(folder: Path) -> Path:
    return folder.with_suffix(".use")


def _final(entry: Path) -> Path:
    """The final name of a folder that is perhaps still in the making."""
    return entry.with_suffix("")


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process has just evicted it
        return 0.0
