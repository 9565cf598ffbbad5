"""End with the process that asked for the work: killing dvc leaves its stage running otherwise.

DVC forwards no signal. A watcher thread looks at the direct parent, and under DVC past shells up to
`dvc` itself, and ends this process when one of them is gone.

A stage that DVC runs watches in this way; so does every process that we start ourselves, with the
process that started it. A stage started by hand watches nobody: it may outlive its shell (nohup).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import psutil

SECONDS_BETWEEN_LOOKS = 0.5
SHELLS = {"sh", "bash", "dash", "zsh", "fish", "ksh", "make"}


def watch(
    on_gone: Callable[[], None], under_dvc: bool, pid: int | None = None
) -> list[psutil.Process]:
    """Start the watcher and give the ancestors it watches.

    Args:
        on_gone: Called once from the watcher's thread when an ancestor has ended.
        under_dvc: Watch on past shells up to the first other program (dvc, or a launcher); else
            only the direct parent: for a process that ends with the one that started it.
        pid: Of the direct parent, as that one has told. Where it ended before this call, another
            process is the parent by now, and `on_gone` is called at once.
    """
    expected = os.getppid() if pid is None else pid
    watched = _ancestors(under_dvc)
    thread = threading.Thread(target=_look, args=(expected, watched, on_gone), daemon=True)
    thread.start()
    return watched


def _ancestors(under_dvc: bool) -> list[psutil.Process]:
    parent = psutil.Process().parent()
    found = [parent] if parent else []
    with contextlib.suppress(psutil.NoSuchProcess):  # the last one found has just ended
        while under_dvc and found and found[-1].name() in SHELLS:
            parent = found[-1].parent()
            if parent is None:
                break
            found.append(parent)
    return found


def _look(expected: int, watched: list[psutil.Process], on_gone: Callable[[], None]) -> None:
    while os.getppid() == expected and all(_alive(process) for process in watched):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    on_gone()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
