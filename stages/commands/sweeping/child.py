"""dvc that ends with the process that started it: `python -m stages.commands.sweeping.child …`.

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
    """Run dvc with these words and give its exit status."""
    from dvc.cli import main as dvc

    parent.watch(lambda: os.killpg(os.getpgrp(), signal.SIGINT), under_dvc=False)
    return dvc(list(argv))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
