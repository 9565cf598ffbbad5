"""The base model: from settings to a manifest, to a folder on this machine, to an MLX module.

GGUF files, wheels and the built-in model are written as MLX folders to `.cache/models/`, each
named by the fingerprint of its source, and made again when missing. Importing this module imports
no MLX; `build_manifest`, `load_model` and a conversion do.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core import console, files, paths
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint
from stages.core.machine.lock import locked
from stages.core.model import sources
from stages.core.model.manifest import MANIFEST, Manifest, Source, read_manifest

if TYPE_CHECKING:
    from mlx import nn

__all__ = ["Manifest", "Source", "build_manifest", "folder", "load_model", "read_manifest"]

VERSIONS = {"gguf": 1, "tiny": 1}
"""Raise a number when what the converter writes changes: it is part of the folder's name."""
CONVERTED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
WAIT_S = 3600.0
MOST_LISTED = 4


def build_manifest(model: schema.Model) -> Manifest:
    """Find the model, hash its files once, and state what it is; fetches and converts as needed.

    Raises:
        UserError: The model cannot be found, fetched, converted or used; no space is left.
    """
    from stages.core.model import architecture

    source = sources.source_of(model)
    place = sources.locate(source, model)
    hashed = sources.hashes(place) if place is not None else {}
    where = _mlx_folder(source, place, hashed, model)
    return Manifest(
        name=_name(source),
        source=source,
        files=hashed or sources.hashes(where),
        **architecture.facts(where, model.dtype),
    )


def folder(manifest: Manifest, model: schema.Model) -> Path:
    """The MLX or Hugging Face folder of the manifest's model on this machine.

    A converted model is made again when it is missing. Files are hashed when they are new or
    changed, else known by size and time.

    Raises:
        UserError: The settings name another model than the manifest, the files are not here, or
            they differ from the manifest's.
    """
    source = sources.source_of(model)
    if source != manifest.source:
        raise _stale(
            f"{_told(source)} in the settings", f"{_told(manifest.source)} in the manifest"
        )
    place = sources.locate(source, model)
    if place is None:
        where = _mlx_folder(source, None, {}, model)
        _compare(manifest, sources.hashes(where))
        return where
    hashed = sources.hashes(place)
    _compare(manifest, hashed)
    return _mlx_folder(source, place, hashed, model)


def load_model(folder: Path, dtype: str = "stored", lazy: bool = False) -> tuple[nn.Module, dict]:
    """Load a model folder with mlx-lm, to compute with it on the device that MLX uses now.

    Args:
        folder, dtype: See `stages.core.model.architecture.load`.
        lazy: Leave arrays unread until they are used.

    Raises:
        UserError: See there; or this device cannot compute the model in its type.
    """
    import mlx.core as mx

    from stages.core.model import architecture

    model, config = architecture.load(folder, dtype)
    architecture.refuse_narrow_experts(model, folder)
    if not lazy:
        mx.eval(model.parameters())
    return model, config


def _mlx_folder(
    source: Source, place: Path | None, hashed: dict[str, Any], model: schema.Model
) -> Path:
    """The source's own folder, or the converted one, made if it is missing."""
    if source.kind in ("hub", "folder"):
        return Path(place or "")
    if place is None:
        return _made(fingerprint(["tiny", VERSIONS["tiny"]]), _write_tiny)
    sums = sorted(str(entry["sha256"]) for entry in hashed.values())
    name = fingerprint(["gguf", VERSIONS["gguf"], sums, model.dtype])
    return _made(name, lambda target: _convert(place, target, model.dtype))


def _write_tiny(target: Path) -> None:
    from stages.core.model import tiny

    tiny.write(target)


def _convert(place: Path, target: Path, dtype: str) -> None:
    from stages.core.model import gguf

    console.say(f"converting {place.name} to an MLX folder in {target.parent} (once)")
    gguf.convert(place, target, dtype)


def _made(name: str, write: Callable[[Path], None]) -> Path:
    """`.cache/models/<name>`, written if it is missing: whole or not at all, by one process."""
    target = paths.cache("models") / name
    if not _whole(target):
        with locked(target.with_suffix(".lock"), "this model's folder", WAIT_S):
            if not _whole(target):
                for left in target.parent.glob(f"{files.TEMPORARY_PREFIX}{name}-*"):
                    shutil.rmtree(left, ignore_errors=True)
                with files.replacing_folder(target) as temporary:
                    write(temporary)
    return target


def _whole(target: Path) -> bool:
    return all((target / name).is_file() for name in CONVERTED)


def _compare(manifest: Manifest, hashed: dict[str, Any]) -> None:
    """Refuse source files that are not those of the manifest, naming each."""
    differences = [
        f"{name}: " + ("not here" if name not in hashed else "not in the manifest")
        for name in sorted(hashed.keys() ^ manifest.files.keys())
    ]
    differences += [
        f"{name}: {entry['sha256'][:12]}, {entry['bytes']} bytes"
        f" (manifest: {manifest.files[name]['sha256'][:12]}, {manifest.files[name]['bytes']} bytes)"
        for name, entry in sorted(hashed.items())
        if name in manifest.files and entry != manifest.files[name]
    ]
    if differences:
        more = len(differences) - MOST_LISTED
        raise _stale(
            "; ".join(differences[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else ""),
            "the files that the manifest was made from",
        )


def _stale(found: str, expected: str) -> UserError:
    return UserError(
        "The model is not the one in data/model.json",
        where=str(MANIFEST),
        found=found,
        expected=expected,
        fix="put the right files back, or accept these: `dvc repro -f model`",
    )


def _name(source: Source) -> str:
    if source.file is not None:
        return Path(source.file).stem if source.kind != "folder" else source.file
    return (source.repo or "").removeprefix(sources.BUILTIN)


def _told(source: Source) -> str:
    at = f" at {source.revision}" if source.revision else ""
    return f"{source.repo or source.file}{at}"
