"""The other end of `stages.core.memory.probe`: one child process that measures points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from stages.core.errors import UserError
from stages.core.memory import limits, recovery
from stages.core.memory.points import Point, Reading, Rest, reading_from, rest_from

MODULE = "stages.core.memory.probe"
SECONDS = 600.0
"""Longest a child may take for one point, the loading of the model included."""


class Child:
    """A process with the model loaded.

    Args:
        request: What to load; see `probe.main`.

    Attributes:
        rest: What rests in its memory, None before its first answer.
        freed: The frozen layers' weights are gone.
        alive: It can measure more.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.rest: Rest | None = None
        self.freed = False
        self.alive = True
        self._kills = limits.oom_kills()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close ends it)
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(os.getpid())],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self._send(request)

    def measure(self, point: Point) -> Reading:
        """The point's reading; the child's death is one too.

        Raises:
            UserError: The model and these settings do not fit.
        """
        self.freed = self.freed or point.way.cached
        self._send({"points": [point.record()]})
        timer = threading.Timer(SECONDS, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                event = json.loads(line)
                if event["event"] == "rest":
                    self.rest = rest_from(event["value"])
                elif event["event"] == "reading":
                    return reading_from(event["value"])
                elif event["event"] == "refused":
                    raise UserError(event["value"].pop("what"), **event["value"])
        finally:
            timer.cancel()
        return Reading(point, died=self._death())

    def close(self) -> None:
        """End it."""
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def _send(self, value: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.alive = False

    def _death(self) -> str:
        """Why it ended, in one line."""
        self.alive = False
        status = self._process.wait()
        self._stderr.seek(0)
        text = self._stderr.read()[-4000:].strip()
        death = recovery.of_process(status, None, text, limits.oom_kills() - self._kills)
        if death.kind == "error" and text:
            return text.splitlines()[-1]
        return death.reason
