"""Where things lie: the pipeline's folder, and the DVC root that holds what outlives a workspace.

`here()` is the folder the stage works in (a temporary one under `dvc exp run --temp`); `root()` is
the user's own checkout, whose `.cache/` and `local.yaml` every workspace shares.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE = ".cache"
KINDS = ("models", "activations", "checkpoints", "plans")


def here() -> Path:
    """The folder of the pipeline that runs: the current directory."""
    return Path.cwd()


def inside(path: str | Path, folder: str) -> bool:
    """Whether a path lies in one of the pipeline's folders, links followed."""
    return (here() / path).resolve().is_relative_to((here() / folder).resolve())


def root() -> Path:
    """The DVC root: `DVC_ROOT` where the current directory lies under it, else `here()`."""
    named = os.environ.get("DVC_ROOT")
    current = here()
    if named:
        candidate = Path(named).resolve()
        if candidate == current.resolve() or candidate in current.resolve().parents:
            return _outermost(candidate)
    return _outermost(current)


def _outermost(folder: Path) -> Path:
    """Step out of a temporary experiment workspace (`.dvc/tmp/exps/…`) to the checkout itself."""
    parts = folder.resolve().parts
    for i in range(len(parts) - 2):
        if parts[i : i + 3] == (".dvc", "tmp", "exps"):
            return Path(*parts[:i])
    return folder


def cache(kind: str = "") -> Path:
    """`.cache/<kind>` at the DVC root: rebuilt when missing, never a dependency."""
    return root() / CACHE / kind if kind else root() / CACHE


def local_settings() -> Path:
    """`local.yaml` at the DVC root: what belongs to this machine."""
    return root() / "local.yaml"
