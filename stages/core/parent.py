"""End with the process that started us: killing dvc leaves its stage running otherwise.

DVC forwards no signal. A watcher thread looks at every ancestor up to the one that asked for the
work (through shells, up to `dvc` where DVC runs the stage) and ends this process when one is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import psutil

SECONDS_BETWEEN_LOOKS = 0.5
SHELLS = {"sh", "bash", "dash", "zsh", "fish", "ksh", "make"}


def watch(on_gone: Callable[[], None], under_dvc: bool) -> list[psutil.Process]:
    """Start the watcher and give the ancestors it watches.

    Args:
        on_gone: Called once from the watcher's thread when an ancestor has ended.
        under_dvc: Watch on past shells up to the first other program (dvc, or a launcher); else
            only the direct parent, so that a run started by hand survives its terminal.
    """
    watched = _ancestors(under_dvc)
    thread = threading.Thread(target=_look, args=(watched, on_gone), daemon=True)
    thread.start()
    return watched


def _ancestors(under_dvc: bool) -> list[psutil.Process]:
    parent = psutil.Process().parent()
    found = [parent] if parent else []
    while under_dvc and found and found[-1].name() in SHELLS:
        parent = found[-1].parent()
        if parent is None:
            break
        found.append(parent)
    return found


def _look(watched: list[psutil.Process], on_gone: Callable[[], None]) -> None:
    first = os.getppid()
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if os.getppid() != first or not all(_alive(process) for process in watched):
            on_gone()
            return


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
