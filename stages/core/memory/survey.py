"""Ask a child process for measurements, and keep them: `.cache/plans/<fingerprint>.json`.

What is kept hangs on the machine, the model and what is trained, never on today's budget, so a
choice can be made anew at once. A child that dies of a point leaves a reading that says so, for
today; the points after it are asked of a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.core import files, paths
from stages.core.config.settings import Settings
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint
from stages.core.machine.device import Device
from stages.core.memory.child import Child
from stages.core.memory.fit import Survey
from stages.core.memory.points import Point, Reading, Rest, reading_from, rest_from
from stages.core.model import models
from stages.core.model.manifest import Manifest

VERSION = 2
"""Raise it when readings of an older version are no longer comparable."""


class Surveyor:
    """Measures points for one run, each once. A context: leaving it ends the child.

    Args:
        settings: `model`, `train` and `run.device` are used.
        manifest: Of the base model.
        device: What computes.
        note: Called with one line for each point that is about to be measured.
        folder: Of the model; default: the manifest's own.

    Attributes:
        measured: How many points were measured here, not known before.
    """

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        device: Device,
        note: Callable[[str], None] = lambda line: None,
        folder: Path | None = None,
    ) -> None:
        self.settings = settings
        self._folder = folder
        self.manifest = manifest
        self.device = device
        self.measured = 0
        self._note = note
        self._file = paths.cache("plans") / f"{self._fingerprint()}.json"
        self._rest, self._readings = self._read()
        self._child: Child | None = None

    @property
    def known(self) -> bool:
        """Whether steps of this model were measured on this machine before."""
        return bool(self._readings)

    def __enter__(self) -> Surveyor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._child is not None:
            self._child.close()

    def ask(self, points: Sequence[Point], again: bool = False) -> Survey:
        """The survey with these points in it, measured unless they are known.

        Args:
            points: Those of the whole model before those from stored activations.
            again: Measure them even so.

        Raises:
            UserError: Not even the model can be loaded in the memory there is, or model and
                settings do not fit.
        """
        todo = [point for point in points if again or point not in self._readings]
        for point in todo:
            self._note(told(point))
            reading = self._ready_for(point).measure(point)
            self._learn(self._child.rest)
            if self._rest is None:
                raise no_room(reading.died)
            self._readings[point] = reading
            self.measured += 1
            self._write()
        if self._rest is None:
            raise ValueError("no points asked for, and none known")
        return Survey(self._rest, dict(self._readings))

    def _learn(self, rest: Rest | None) -> None:
        """Take what a child says of rest; one that never freed the frozen layers knows less."""
        if rest is not None and self._rest is not None:
            rest = replace(rest, above=min(rest.above, self._rest.above))
        self._rest = rest or self._rest

    def _ready_for(self, point: Point) -> Child:
        """A living child that still has the weights for this point."""
        whole_model = not point.way.cached and point.kind not in PARTS
        if self._child is not None and (
            not self._child.alive or (self._child.freed and whole_model)
        ):
            self._child.close()
            self._child = None
        if self._child is None:
            self._child = Child(self._request())
        return self._child

    def _request(self) -> dict[str, Any]:
        folder = self._folder or models.folder(self.manifest, self.settings.model)
        return {
            "folder": str(folder.resolve()),
            "dtype": self.settings.model.dtype,
            "train": asdict(self.settings.train),
            "device": "cpu" if self.device.kind == "cpu" else "gpu",
            "vocabulary": self.manifest.vocab_size,
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
            record = files.read_json(self._file)
            readings = [reading_from(entry) for entry in record["readings"]]
            return rest_from(record["rest"]), {reading.point: reading for reading in readings}
        except (UserError, KeyError, TypeError):
            return None, {}

    def _write(self) -> None:
        numbers = sorted(point for point, reading in self._readings.items() if not reading.died)
        record = {
            "model": self.manifest.name,
            "device": self.device.name,
            "rest": self._rest.record(),
            "readings": [self._readings[point].record() for point in numbers],
        }
        files.write_json(self._file, record)


PARTS = ("attention", "head", "update")
"""Kinds that need no layers' weights."""


def told(point: Point) -> str:
    """A point for a person."""
    shape = f"{point.rows} × {point.width} tokens" if point.kind not in ("head", "update") else ""
    targets = f"{point.targets} targets" if point.kind in ("head", "whole") else ""
    way = point.way.told() if point.kind in ("layers", "whole") else ""
    return ", ".join(word for word in (point.kind, shape, targets, way) if word)


def no_room(reason: str) -> UserError:
    """The message where a child could not even load the model."""
    return UserError(
        "The model cannot be loaded to measure a step",
        where="python -m stages.core.memory.probe",
        found=reason,
        fix="free memory, or choose a smaller or a quantized model",
    )
