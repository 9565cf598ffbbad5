"""Files that git does not know: a temporary workspace and a clone would lack them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from stages.commands.sharing import git
from stages.core.errors import UserError, listed

KEPT = ("data/source", "data/adapters")
"""Folders whose contents `dvc add` keeps."""
PROJECT = ("conf", "hydra_plugins", "stages", "dvc.yaml", "pyproject.toml", ".dvc/config")


def dependencies(folder: Path) -> list[str]:
    """What the stages after compose read and no stage writes: code, rows.

    Raises:
        UserError: dvc.yaml is missing.
    """
    file = folder / "dvc.yaml"
    if not file.exists():
        raise UserError("There is no dvc.yaml here", where=str(folder), fix="run from the root")
    stages = yaml.safe_load(file.read_text(encoding="utf-8"))["stages"]
    written = {
        _path(out)
        for stage in stages.values()
        for kind in ("outs", "metrics", "plots")
        for out in stage.get(kind, [])
    }
    read = {
        str(dep) for name, stage in stages.items() if name != "compose" for dep in stage["deps"]
    }
    return sorted(dep for dep in read if not any(f"{dep}/".startswith(f"{w}/") for w in written))


def _path(out: str | dict) -> str:
    return out if isinstance(out, str) else str(next(iter(out)))


def require_rows(folder: Path) -> None:
    """Refuse rows, and adapters to start from, that neither git nor DVC keeps.

    Raises:
        UserError: Something of them would be missing elsewhere; the `dvc add` line.
    """
    others = git.listed("ls-files", "--others", "-z", "--", *KEPT, cwd=folder)
    known = set(git.listed("ls-files", "-z", "--", *KEPT, cwd=folder))
    missing: dict[str, str] = {}
    for path in others:
        if Path(path).name.startswith(".") or _kept_by_dvc(path, known):
            continue
        name = "/".join(path.split("/")[:3])
        name = name.removesuffix(".dvc") if (folder / f"{name}").suffix == ".dvc" else name
        missing[name] = f"{name}.dvc"
    if not missing:
        return
    new = [name for name, kept in missing.items() if not (folder / kept).exists()]
    steps = [f"dvc add {' '.join(new)}"] if new else []
    folders = sorted({name.rsplit("/", maxsplit=1)[0] for name in missing})
    ignores = " ".join(f"{one}/.gitignore" for one in folders)
    steps.append(f"git add {' '.join(missing.values())} {ignores}")
    raise UserError(
        "Files are kept neither by git nor by DVC, so a temporary workspace and a clone lack them",
        where=", ".join(folders),
        found=listed(sorted(missing)),
        expected="files that `dvc add` or `git add` has taken",
        fix=" && ".join(steps),
    )


def _kept_by_dvc(path: str, known: set[str]) -> bool:
    """Whether a tracked .dvc file stands for a path or for a folder that holds it."""
    parts = path.split("/")
    return any("/".join(parts[:i]) + ".dvc" in known for i in range(1, len(parts) + 1))


def require_project(folder: Path, also: Sequence[str] = ()) -> None:
    """Refuse code and settings that git does not track.

    Args:
        folder: The project's root.
        also: Further files that the settings name, relative to it.

    Raises:
        UserError: Such files exist; the `git add` line.
    """
    paths = sorted({*PROJECT, *dependencies(folder), *also} - set(KEPT))
    others = git.listed(
        "ls-files", "--others", "--exclude-standard", "-z", "--", *paths, cwd=folder
    )
    if others:
        raise UserError(
            "git does not track files that a run reads, so a temporary workspace and a clone lack"
            " them",
            found=listed(others),
            fix=f"git add {' '.join(_short(others))}",
        )


def _short(paths: Sequence[str], most: int = 5) -> list[str]:
    """A few paths as they are, many as their folders."""
    if len(paths) <= most:
        return list(paths)
    return sorted({path.split("/", maxsplit=1)[0] for path in paths})
