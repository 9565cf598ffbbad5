"""dvc that ends with the process that started it: `… -m stages.commands.sweeping.child PID …`.

It leads a process group of its own. When its parent is gone it interrupts the whole group as Ctrl-C
would, so that training writes a checkpoint and DVC removes the temporary workspace.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from stages.core.machine import parent


def main(argv: Sequence[str]) -> int:
    """Run dvc and give its exit status.

    Args:
        argv: The process id of the parent, then dvc's own words.
    """
    # Before dvc is imported, which takes a second: a parent that ends meanwhile is noticed too.
    interrupt = lambda: os.killpg(os.getpgrp(), signal.SIGINT)
    parent.watch(interrupt, under_dvc=False, pid=int(argv[0]))
    from dvc.cli import main as dvc

    return dvc(list(argv[1:]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
