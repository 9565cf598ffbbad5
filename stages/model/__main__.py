"""`python -m stages.model` writes data/model.json; with `--path` it prints the MLX folder."""

import sys

from stages.core import console, entry, files
from stages.core.config.settings import Settings
from stages.core.machine import device
from stages.core.model import models
from stages.core.model.manifest import MANIFEST


def run(settings: Settings) -> None:
    """Find (fetch, convert) the model and write its manifest."""
    device.prepare(settings.run.device)
    manifest = models.build_manifest(settings.model)
    files.write_json(MANIFEST, manifest.record())
    console.say(manifest.line())


def show_path(settings: Settings) -> None:
    """Print the folder that mlx-lm's own commands take as `--model`."""
    device.load_blas()
    print(models.folder(models.read_manifest(), settings.model).resolve())


if __name__ == "__main__":
    words = sys.argv[1:]
    name, work = ("model --path", show_path) if "--path" in words else ("model", run)
    raise SystemExit(entry.stage(name, work, [word for word in words if word != "--path"]))
