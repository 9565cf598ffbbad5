"""The process between the supervisor and the ranks of a run (`run.launch`): it starts them all."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from stages.core.config.settings import Settings
from stages.core.machine import launch
from stages.train.identity import checkpoints, run_fingerprint


def run(settings: Settings, parent: int, overrides: Sequence[str]) -> int:
    """Train in several processes, and give the exit status of the whole.

    Args:
        settings: Of this run.
        parent: Process id of the supervisor; this process ends with it.
        overrides: `memory.*` and `run.*` words of the command line, passed on.

    Raises:
        UserError: A host cannot be used.
        RunFailed: A rank was lost.
    """
    launched = settings.run.launch
    # On another host the parent is what ssh starts there, with a process id of its own.
    parent_of_rank = os.getpid() if launched.here() == launched.workers() else 0
    command = [sys.executable, "-m", "stages.train", f"--child={parent_of_rank}", *overrides]
    # Another host has another local.yaml.
    command.append(f"run.launch.hosts=[{','.join(launched.names())}]")
    command.append(f"run.launch.backend={launched.backend}")
    return launch.run(launched, command, checkpoints(run_fingerprint(settings)), parent)
