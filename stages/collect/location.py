"""Where the data lies: the folder or file that `data.path` means."""

from __future__ import annotations

from pathlib import Path

from stages.collect.readers import format_of
from stages.core import paths
from stages.core.errors import UserError

SOURCE = Path("data/source")


def locate(path: str | None) -> tuple[Path, list[str]]:
    """Find the folder or file that `data.path` means; null is the only one beside toy.

    Returns:
        The path, and warnings about it.

    Raises:
        UserError: There is none, there are several, or it was not pulled.
    """
    if path is None:
        return _only_one(), []
    found = paths.here() / path
    if paths.here().resolve().is_relative_to(found.resolve()):
        raise UserError(
            "data.path holds the project itself",
            where="data.path",
            found=path,
            expected=f"a folder or file of rows, such as {SOURCE}/NAME",
            fix="set data.path in conf/data",
        )
    pointer = found.with_name(found.name + ".dvc")
    if not found.exists():
        raise UserError(
            "data.path does not exist",
            where=path,
            found="a .dvc file without its data" if pointer.exists() else None,
            expected="a folder or a file",
            fix=f"dvc pull {path}.dvc" if pointer.exists() else "set data.path in conf/data",
        )
    if not found.is_file() and not found.is_dir():
        raise UserError(
            "data.path is neither a file nor a folder",
            where=path,
            expected="a folder or a file",
            fix="set data.path in conf/data",
        )
    inside = paths.inside(path, SOURCE)
    outside = f"data.path lies outside {SOURCE}: DVC cannot see when it changes"
    return found, [] if inside else [outside]


def _only_one() -> Path:
    folder = paths.here() / SOURCE
    if not folder.is_dir():
        raise UserError(
            f"There is no folder {SOURCE}",
            fix=f"mkdir -p {SOURCE}, put your files into {SOURCE}/NAME",
        )
    found = [
        entry
        for entry in sorted(folder.iterdir())
        if not entry.name.startswith(".")
        and entry.name != "toy"
        and (entry.is_dir() or format_of(entry))
    ]
    if len(found) == 1:
        return found[0]
    pointers = [entry.name for entry in sorted(folder.glob("*.dvc"))]
    if not found and pointers:
        fix = f"dvc pull {SOURCE}/{pointers[0]}"
    elif not found:
        fix = f"put your files into {SOURCE}/NAME, or choose data=toy or data=docstrings"
    else:
        fix = f"choose one: data.path={SOURCE}/{found[0].name}"
    raise UserError(
        f"{SOURCE} holds no data of yours" if not found else "data.path does not say which data",
        where=str(SOURCE),
        found=", ".join(entry.name for entry in found) or "nothing beside toy",
        expected=f"one folder or file in {SOURCE}, or data.path",
        fix=fix,
    )
