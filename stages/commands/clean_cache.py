"""Remove what .cache can rebuild: models, activations, plans, downloads."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from stages.core import console, entry, files, paths
from stages.core.errors import UserError

REBUILT = {
    "models": "written again from their source",
    "activations": "computed again by the next run that wants them",
    "plans": "measured again",
    "hub": "downloaded again",
}
KEPT = {
    "checkpoints": "unfinished runs start over without them",
    "tracking": "what wandb or swanlab keep of a run on this machine",
    "compose": "tells values of an applied experiment from those of conf/",
    "sweeps": "logs and times of sweeps; finished points stay experiments",
}


def main(argv: Sequence[str]) -> int:
    """Remove the kinds named, by default all that can be rebuilt."""
    parser = argparse.ArgumentParser(
        prog="python -m stages clean-cache",
        description="Remove folders of .cache; a run that needs them makes them again.",
        epilog="\n".join(f"{kind:<12} {text}" for kind, text in {**REBUILT, **KEPT}.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help="what to remove; default: " + ", ".join(REBUILT),
    )
    kinds = parser.parse_args(argv).kinds or list(REBUILT)
    return entry.guarded("clean-cache", lambda: clean(kinds))


def clean(kinds: Sequence[str]) -> None:
    """Remove these kinds and what killed processes left under temporary names.

    A folder is renamed before it is removed, so that a kill in between leaves no half of it.

    Raises:
        UserError: There is no such kind, or a process works in one of them; nothing is removed.
    """
    root = paths.cache()
    for kind in set(kinds) - {*REBUILT, *KEPT}:
        raise UserError(
            "The cache has no such kind",
            found=kind,
            expected=", ".join([*REBUILT, *KEPT]),
            fix="see `python -m stages clean-cache --help`",
        )
    for kind in kinds:
        _refuse_in_use(root / kind)
    for kind in kinds:
        folder = root / kind
        if not folder.exists():
            continue
        size = size_gb(folder)
        aside = root / f"{files.TEMPORARY_PREFIX}{kind}-{uuid.uuid4().hex[:8]}"
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
        console.say(f"{kind}: {size:.2f} GB removed")
    if root.exists():
        files.remove_leftovers(root)


def sizes() -> dict[str, float]:
    """GB by kind, for every folder of .cache."""
    root = paths.cache()
    folders = sorted(entry for entry in root.glob("*") if entry.is_dir())
    return {folder.name: size_gb(folder) for folder in folders}


def size_gb(folder: Path) -> float:
    """What a folder's files take on the disk, in GB (1e9 bytes)."""
    total = 0
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            total += file.stat().st_blocks * 512
    return total / 1e9


def _refuse_in_use(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.name.endswith(("lock", "working", "use")) and _held(file):
            pid = file.read_text(errors="replace").strip()
            raise UserError(
                "A process works in this folder",
                where=str(file.parent),
                found=f"process {pid}" if pid else f"a lock on {file.name}",
                fix="wait for it to end, or end it, then run again",
            )


def _held(file: Path) -> bool:
    """Whether somebody holds a lock; those who only read share theirs (`.use`)."""
    with open(file, "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
