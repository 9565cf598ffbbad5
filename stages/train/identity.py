"""The name of a run: equal mathematics, equal name, whatever the machine and its settings."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from pathlib import Path

from stages.core import files, paths
from stages.core.config.settings import Settings
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint
from stages.core.machine.device import ENGINE
from stages.core.model.manifest import MANIFEST

EXAMPLES = Path("data/examples")
TRAIN, VALID = EXAMPLES / "train.parquet", EXAMPLES / "valid.parquet"


def run_fingerprint(settings: Settings) -> str:
    """The fingerprint of model, examples, train settings and engine versions.

    Without `train.stop_at_update`, so that a run ended early goes on when that is lifted, and
    without `memory.*` and `run.*`. Adapters to start from count by content.

    Raises:
        UserError: A file of an earlier stage, or the adapters to start from, are missing.
    """
    train = asdict(settings.train)
    del train["stop_at_update"]
    if settings.train.initial_adapters is not None:
        train["initial_adapters"] = _sha256(
            Path(settings.train.initial_adapters) / "adapters.safetensors",
            "set train.initial_adapters to a folder with adapters, or to null",
        )
    return fingerprint(
        {
            "model": files.read_json(MANIFEST),
            "examples": {file.stem: _sha256(file, "run `dvc repro`") for file in (TRAIN, VALID)},
            "train": train,
            "engine": {name: importlib.metadata.version(name) for name in ENGINE},
        }
    )


def checkpoints(name: str) -> Path:
    """The folder of a run's checkpoints, by its fingerprint."""
    return paths.cache("checkpoints") / name


def _sha256(file: Path, fix: str) -> str:
    if not file.is_file():
        raise UserError("A file that training needs is missing", where=str(file), fix=fix)
    return files.sha256_file(file)
