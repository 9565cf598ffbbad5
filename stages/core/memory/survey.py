"""Ask a child process for measurements, and keep them: `.cache/plans/<fingerprint>.json`.

What is kept hangs on the machine, the model and what is trained, never on today's budget, so a
choice can be made anew at once. A child that dies of a point leaves a reading that says so; the
points after it are asked of a fresh one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.core import files, models, paths
from stages.core.device import Device
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint
from stages.core.manifest import Manifest
from stages.core.memory import limits, recovery
from stages.core.memory.points import Point, Reading, Rest, point_from, reading_from, rest_from
from stages.core.settings import Settings

VERSION = 1
"""Raise it when readings of an older version are no longer comparable."""
MODULE = "stages.core.memory.probe"
SECONDS = 600.0
"""Longest a child may take for one point."""


@dataclass(frozen=True)
class Survey:
    """What is known of one model, what is trained of it, and this machine.

    Attributes:
        rest: What rests in memory.
        readings: Latest reading of each point.
    """

    rest: Rest
    readings: dict[Point, Reading]

    def of(self, kind: str) -> list[Reading]:
        """Readings of one kind that gave a number."""
        return [x for point, x in self.readings.items() if point.kind == kind and not x.died]


class Surveyor:
    """Measures points for one run, each once.

    Args:
        settings: `model`, `train` and `run.device` are used.
        manifest: Of the base model.
        device: What computes.
        note: Called with one line for each point that is about to be measured.
    """

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        device: Device,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings = settings
        self.manifest = manifest
        self.device = device
        self.note = note
        self.measured = 0
        self.file = paths.cache("plans") / f"{self._fingerprint()}.json"
        self.known = self._read()

    def ask(self, points: Sequence[Point], again: bool = False) -> Survey:
        """The survey with these points in it, measured unless they are known.

        Args:
            points: Those of the whole model before those from stored activations.
            again: Measure them even so.

        Raises:
            UserError: Not even the model can be loaded in the memory there is.
        """
        rest, readings = self.known
        todo = [point for point in points if again or point not in readings]
        while todo:
            rest, found, reason = self._child(todo, rest)
            if rest is None:
                raise no_room(reason)
            readings.update({reading.point: reading for reading in found})
            done = {reading.point for reading in found}
            self.measured += len(done)
            todo = [point for point in todo if point not in done]
            self.known = rest, readings
            self._write()
        if rest is None:
            raise ValueError("no points asked for, and none known")
        return Survey(rest, readings)

    def _child(self, points: list[Point], rest: Rest | None) -> tuple[Rest | None, list, str]:
        """Readings of one child until it ends; at least one, where it could load the model."""
        kills = limits.oom_kills()
        with tempfile.TemporaryFile("w+") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                cwd=Path(__file__).parents[3],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            try:
                rest, found, running = self._listen(child, points, rest)
            finally:
                child.kill()
                status = child.wait()
            stderr.seek(0)
            text = stderr.read()[-4000:]
        if status == 0 and running is None:
            return rest, found, ""
        death = recovery.of_process(status, None, text, limits.oom_kills() - kills)
        reason = death.reason if death.kind != "error" else (text.strip() or "?").splitlines()[-1]
        if running is None and not found:
            return None, [], reason
        unread = [point for point in points if point not in {x.point for x in found}]
        return rest, [*found, Reading(running or unread[0], died=reason)], reason

    def _listen(
        self, child: subprocess.Popen, points: list[Point], rest: Rest | None
    ) -> tuple[Rest | None, list[Reading], Point | None]:
        """Send the request, take events; the point that was running when they ended, or None."""
        child.stdin.write(json.dumps(self._request(points)) + "\n")
        child.stdin.close()
        found: list[Reading] = []
        running: Point | None = None
        watch = Watch(child)
        for line in child.stdout:
            watch.beat()
            event = json.loads(line)
            if event["event"] == "rest":
                rest = rest_from(event["value"])
            elif event["event"] == "begin":
                running = point_from(event["value"])
                self.note(told(running))
            else:
                found.append(reading_from(event["value"]))
                running = None
        watch.end()
        child.wait()
        return rest, found, running

    def _request(self, points: list[Point]) -> dict[str, Any]:
        return {
            "folder": str(models.folder(self.manifest, self.settings.model).resolve()),
            "dtype": self.settings.model.dtype,
            "train": asdict(self.settings.train),
            "device": "cpu" if self.device.kind == "cpu" else "gpu",
            "vocabulary": self.manifest.vocab_size,
            "points": [point.record() for point in points],
        }

    def _fingerprint(self) -> str:
        train, device = self.settings.train, self.device
        return fingerprint(
            {
                "version": VERSION,
                "machine": [device.kind, device.name, device.threads, device.blas],
                "versions": device.versions,
                "model": [self.manifest.files, self.settings.model.dtype],
                "trained": [train.fine_tune_type, train.num_layers, asdict(train.lora_parameters)],
                "optimizer": [train.optimizer, train.optimizer_config],
            }
        )

    def _read(self) -> tuple[Rest | None, dict[Point, Reading]]:
        try:
            record = files.read_json(self.file)
            readings = [reading_from(entry) for entry in record["readings"]]
            return rest_from(record["rest"]), {reading.point: reading for reading in readings}
        except (UserError, KeyError, TypeError):
            return None, {}

    def _write(self) -> None:
        rest, readings = self.known
        record = {
            "model": self.manifest.name,
            "device": self.device.name,
            "rest": rest.record(),
            "readings": [readings[point].record() for point in sorted(readings)],
        }
        files.write_json(self.file, record)


class Watch:
    """Ends a child that says nothing for `SECONDS`."""

    def __init__(self, child: subprocess.Popen) -> None:
        self._child = child
        self._last = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def beat(self) -> None:
        """The child has said something."""
        self._last = time.monotonic()

    def end(self) -> None:
        """Stop looking."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            if time.monotonic() - self._last > SECONDS:
                self._child.kill()
                return


def told(point: Point) -> str:
    """A point for a person."""
    shape = f"{point.rows} × {point.width} tokens" if point.kind not in ("head", "update") else ""
    targets = f"{point.targets} targets" if point.kind in ("head", "whole") else ""
    way = point.way.told() if point.kind in ("layers", "whole") else ""
    return ", ".join(word for word in (point.kind, shape, targets, way) if word)


def no_room(reason: str) -> UserError:
    """The message where a child could not even load the model."""
    return UserError(
        "The model cannot be loaded to measure it",
        where="python -m stages.core.memory.probe",
        found=reason,
        fix="free memory, or choose a smaller or a quantized model",
    )
