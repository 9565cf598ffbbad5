"""What is exported: base model and adapter, loaded as often as a check needs them fresh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx import nn

from stages.commands.exporting import rows
from stages.commands.exporting.rows import Row, Seen
from stages.core import console
from stages.core.config.settings import Settings
from stages.core.errors import UserError
from stages.core.model import models
from stages.core.model.manifest import MANIFEST, Manifest, read_manifest
from stages.core.update import adapters


@dataclass(frozen=True)
class Subject:
    """Base model and adapter of this run.

    Attributes:
        settings, manifest: Of the run.
        folder: The base model's MLX folder on this machine.
        adapters: The adapter folder.
        config: Its adapter_config.json.
        rows: What exports are checked on.
        base, tuned: What the model says without and with the adapter.
    """

    settings: Settings
    manifest: Manifest
    folder: Path
    adapters: Path
    config: dict[str, Any]
    rows: list[Row]
    base: Seen
    tuned: Seen

    def load(self) -> tuple[nn.Module, dict[str, Any]]:
        """The base model and its config.json; arrays are unread until they are used."""
        return models.load_model(self.folder, self.settings.model.dtype, lazy=True)

    def see(self, model: nn.Module) -> Seen:
        """What a model says about the rows; it is good for nothing else afterwards."""
        return rows.observe(rows.forward(model), self.rows)


def open_subject(settings: Settings, folder: Path) -> Subject:
    """Load the run's base model and adapter and look at both.

    Raises:
        UserError: Something is missing, does not fit, or the adapter is of another base model.
    """
    adapters.check(folder)
    config = adapters.read_config(folder)
    manifest = read_manifest()
    _refuse_other_base(config, manifest, folder)
    split, chosen = rows.choose()
    place = models.folder(manifest, settings.model)
    model, _ = models.load_model(place, settings.model.dtype, lazy=True)
    forward = rows.forward(model)
    base = rows.observe(forward, chosen)
    adapters.load(folder, model)
    tuned = rows.observe(rows.forward(model), chosen)
    count = sum(len(row.targets) for row in chosen)
    console.say(f"checks on {len(chosen)} {split} rows, {count} targets")
    return Subject(settings, manifest, place, folder, config, chosen, base, tuned)


def _refuse_other_base(config: dict[str, Any], manifest: Manifest, folder: Path) -> None:
    """Adapters of this project name the commit of their base; those of mlx-lm do not."""
    source = manifest.source
    here = (source.repo or source.file or manifest.name, source.revision)
    there = (config.get("model"), config.get("model_revision"))
    if "model_revision" in config and there != here:
        raise UserError(
            "The adapter was trained on another base model",
            where=str(folder / adapters.CONFIG),
            found=" at ".join(str(part) for part in there if part),
            expected=" at ".join(str(part) for part in here if part) + f", as {MANIFEST} says",
            fix="run `dvc repro`",
        )
