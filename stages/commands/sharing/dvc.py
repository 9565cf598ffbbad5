"""DVC as this project asks it: words in, text out, its last words where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from stages.core.errors import RunFailed

BUSY = "Unable to acquire lock"
TRIES = 10
SECONDS_BETWEEN_TRIES = 1.0


def run(*words: str, cwd: Path) -> str:
    """What a dvc command prints; a lock that another process holds is waited for.

    Raises:
        RunFailed: dvc ends with another status than 0; its last lines are in the message.
    """
    for last in (*[False] * (TRIES - 1), True):
        status, output = tried(*words, cwd=cwd)
        if status == 0:
            return output
        if BUSY not in output or last:
            break
        time.sleep(SECONDS_BETWEEN_TRIES)
    told = [line.strip() for line in output.splitlines() if line.strip()]
    raise RunFailed(
        f"`dvc {' '.join(words[:2])}` failed",
        where=str(cwd),
        found=" ".join(told[-4:]) or f"status {status}",
    )


def tried(*words: str, cwd: Path) -> tuple[int, str]:
    """Exit status and output (stdout, then stderr) of a dvc command."""
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *words],
        cwd=cwd,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
