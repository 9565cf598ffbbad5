"""dvc started ahead: the process of the next point imports dvc while the present one evaluates.

One such process at most waits, in each process that runs points. It has read nothing of the project
yet, and ends by itself when the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_waiting: subprocess.Popen | None = None


def prepare(root: Path) -> None:
    """Start the next dvc, where none waits."""
    global _waiting
    if _waiting is None:
        _waiting = subprocess.Popen(
            [sys.executable, "-m", "stages.commands.sweeping.child", str(os.getpid())],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


def start(root: Path, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    """Run dvc in the process that waits, or in a new one, and give it.

    Args:
        root: The project's folder.
        words: dvc's words.
        environment: Of dvc and its stages.
    """
    global _waiting
    for _ in range(2):  # the one that waited may have been ended from outside
        prepare(root)
        child, _waiting = _waiting, None
        try:
            with child.stdin:
                child.stdin.write(
                    json.dumps({"words": list(words), "environment": dict(environment)}) + "\n"
                )
            break
        except BrokenPipeError:
            child.wait()
    return child


def end() -> None:
    """End the process that waits, if there is one: it has done nothing yet."""
    global _waiting
    child, _waiting = _waiting, None
    if child is not None:
        child.kill()
        child.communicate()
