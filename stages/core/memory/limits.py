"""Memory limits that the system sets on this process: cgroups, address space, and what is free.

Linux keeps a limit and a count of processes killed for memory per cgroup, in version 2
(`memory.max`, `memory.events`) or version 1 (`memory.limit_in_bytes`, `memory.oom_control`); the
tightest of a cgroup and its parents holds. Elsewhere there are none.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60


def cgroup_folders(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> Iterator[Path]:
    """Folders of this process's memory cgroup and of its parents, innermost first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = mount / "memory" if controllers else mount
        folder = top / path.lstrip("/")
        while top in (folder, *folder.parents):
            if folder.is_dir():
                yield folder
            folder = folder.parent


def cgroup_free(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int | None:
    """Bytes that the tightest memory cgroup still allows, None where nothing is limited."""
    found = []
    for folder in cgroup_folders(membership, mount):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and limit < UNLIMITED:
            found.append(max(0, limit - (used or 0) + _reclaimable(folder)))
    return min(found, default=None)


def oom_kills(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int:
    """Processes that the kernel has killed for memory, in this cgroup or the whole system.

    Only its growth tells something.
    """
    counts = [_line(Path("/proc/vmstat"), "oom_kill")] if mount == MOUNT else []
    for folder in cgroup_folders(membership, mount):
        for name in ("memory.events", "memory.oom_control"):
            counts.append(_line(folder / name, "oom_kill"))
    return max(counts, default=0)


def available() -> int:
    """Bytes that a new process can take now without pushing others out."""
    free = psutil.virtual_memory().available
    limited = cgroup_free()
    return free if limited is None else min(free, limited)


def address_space() -> int | None:
    """The limit on this process's address space in bytes, None where there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY or sys.platform == "darwin" else limit


def headroom(process: psutil.Process | None = None) -> tuple[int, int]:
    """(bytes in use, bytes that may be in use) under the limit that is nearest to its end.

    Args:
        process: This one, where a caller keeps it; default: a new handle on it.
    """
    used = (process or psutil.Process()).memory_info()
    pairs = [(used.rss, used.rss + available())]
    limit = address_space()
    if limit is not None:
        pairs.append((used.vms, limit))
    return min(pairs, key=lambda pair: pair[1] - pair[0])


def _number(*files: Path) -> int | None:
    """The number in the first of these files that exists; None for "max"."""
    for file in files:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _line(file: Path, name: str) -> int:
    """The number after `name` in a file of "name number" lines, 0 where there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    values = [line.split()[1] for line in lines if line.split()[:1] == [name]]
    return int(values[0]) if values else 0


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that count as used but are given up on demand."""
    return max(
        _line(folder / "memory.stat", name) for name in ("inactive_file", "total_inactive_file")
    )
