"""dvc that ends with the process that started it: `… -m stages.commands.sweeping.child PID`.

It imports dvc, which takes most of a second, and then waits for one line on its standard input:
JSON with dvc's words and the environment. So it can be started while the point before still runs.
Where that input ends first, nobody needs it any more and it ends.

It leads a process group of its own. When its parent is gone it interrupts the whole group as Ctrl-C
would, so that training writes a checkpoint and DVC removes the temporary workspace.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from stages.core.machine import parent

IMPORTED = (
    "dvc.cli",
    "dvc.cli.parser",
    "dvc.commands.experiments.run",
    "dvc.repo.experiments.queue.celery",
    "dvc.repo.experiments.queue.tempdir",
    "dvc.repo.experiments.run",
    "dvc.repo.graph",
    "dvc.repo.index",
    "dvc.repo.open_repo",
    "dvc.utils.hydra",
    "dvc.utils.strictyaml",
    "dulwich.porcelain",
    "hydra.compose",
    "networkx",
    "pygit2",
    "ruamel.yaml",
    "tomlkit",
)
"""What `dvc exp run --temp` imports sooner or later. Hydra's plugins and the project's own schema
are left out: they are read when the point starts."""
OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Python's own 700 make it look at dvc's many long-lived objects again and again."""


def main(argv: Sequence[str]) -> int:
    """Run dvc and give its exit status.

    Args:
        argv: The process id of the parent.
    """
    # Before dvc is imported: a parent that ends meanwhile is noticed too.
    interrupt = lambda: os.killpg(os.getpgrp(), signal.SIGINT)
    parent.watch(interrupt, under_dvc=False, pid=int(argv[0]))
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # another DVC may have it elsewhere
            importlib.import_module(name)
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    line = sys.stdin.readline()
    if not line:
        return 0
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    asked = json.loads(line)
    os.environ.clear()
    os.environ.update(asked["environment"])
    from dvc.cli import main as dvc

    return dvc(asked["words"])


def end(status: int) -> None:
    """End without taking dvc's objects apart one by one, which takes a sixth of a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
