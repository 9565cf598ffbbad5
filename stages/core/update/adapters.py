"""The adapter folder, as mlx-lm reads it: `adapters.safetensors` and `adapter_config.json`.

`mlx_lm.generate --adapter-path` and `mlx_lm.fuse` take it as it is. What is trained, and from which
values, is decided in `stages.core.model.trainable`, whose names are given here too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from stages.core import files
from stages.core.config import schema
from stages.core.errors import RunFailed, UserError, listed
from stages.core.model import tensors
from stages.core.model.manifest import Manifest
from stages.core.model.trainable import Attached, attach, lora_config, trained, wrap

__all__ = ["Attached", "attach", "check", "config", "load", "read_config", "save", "trained"]

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
MOST_LISTED = 8
LONGEST_HEADER = 100_000_000
"""Bytes, as the safetensors library allows."""


def save(
    folder: Path, weights: dict[str, mx.array], manifest: Manifest, train: schema.Train
) -> None:
    """Write the adapter folder: whole or not at all, without machine paths, bytes by content alone.

    Args:
        folder: Replaced if it exists.
        weights: `trained(model)`, or the best of a run.
        manifest: The base model, named in the config.
        train: The settings that shaped the adapters.

    Raises:
        RunFailed: A number is not finite; nothing is written.
        UserError: No space is left.
    """
    broken = [name for name, array in weights.items() if not _finite(array)]
    if broken:
        raise RunFailed(
            "Adapters with NaN or infinity are never saved",
            found=f"not finite: {listed(sorted(broken))}",
            fix="lower train.learning_rate, or set train.clip_norm",
        )
    with files.replacing_folder(folder) as temporary:
        tensors.write(temporary / WEIGHTS, dict(weights))
        files.write_json(temporary / CONFIG, config(manifest, train))


def config(manifest: Manifest, train: schema.Train) -> dict[str, Any]:
    """adapter_config.json: what mlx-lm reads, and which base model the adapters belong to."""
    full = train.fine_tune_type == "full"
    return {
        "fine_tune_type": train.fine_tune_type,
        "num_layers": train.num_layers,
        "lora_parameters": None if full else lora_config(train),
        "learning_rate": train.learning_rate,
        "optimizer": train.optimizer,
        "seed": train.seed,
        "model": manifest.source.repo or manifest.source.file or manifest.name,
        "model_revision": manifest.source.revision,
        "model_dtype": manifest.dtype,
        "model_type": manifest.model_type,
    }


def load(folder: Path, model: nn.Module) -> None:
    """Fill a model with the adapters of a folder (ours or mlx-lm's own).

    A plain model is given adapter layers by the folder's config first. A model that `attach` has
    prepared is a warm start: names and shapes must be those of its trained arrays.

    Raises:
        UserError: A file is missing or unreadable, a name or shape differs (they are listed), or a
            number is not finite. No array of the model has changed then.
    """
    settings = read_config(folder)
    weights = _read_weights(folder)
    full = settings["fine_tune_type"] == "full"
    prepared = _prepared(model)
    if not prepared and not full:
        model.freeze()
        wrap(model, settings["num_layers"], settings["lora_parameters"], settings["fine_tune_type"])
        model.train(model.training)  # new layers start in training mode: dropout would be on
    whole = full and not prepared
    expected = dict(tree_flatten(model.parameters())) if whole else trained(model)
    _compare(folder, weights, expected, partial=whole)
    cast = [(name, array.astype(expected[name].dtype)) for name, array in weights.items()]
    model.load_weights(cast, strict=False)
    mx.eval([array for _, array in cast])  # not the base: it may be lazy


def check(folder: Path) -> None:
    """Refuse a folder whose config or weights are missing or torn, before a model is loaded.

    Only the header of the weights is read: safetensors says in it how long the file is.

    Raises:
        UserError: See above.
    """
    read_config(folder)
    path = Path(folder) / WEIGHTS
    what = "An adapter folder cannot be used"
    fix = "copy the whole file again, or make it anew: `dvc repro train`"
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError(f"of {length} bytes")
            header = json.loads(file.read(length)) if length <= size - 8 else None
        entries = {} if header is None else {k: v for k, v in header.items() if k != "__metadata__"}
        whole = 8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0)
    except FileNotFoundError as error:
        found = "no such file"
        raise UserError(what, where=str(path), found=found, expected=WEIGHTS, fix=fix) from error
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        found = f"a header that is none ({error})"
        raise UserError(
            what, where=str(path), found=found, expected="safetensors", fix=fix
        ) from error
    if size != whole:
        raise UserError(
            what,
            where=str(path),
            found=f"{size} bytes",
            expected=f"{whole} bytes, as its header says",
            fix=fix,
        )


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json with `fine_tune_type` filled in (files before it existed mean LoRA).

    Raises:
        UserError: It is missing, no JSON, or lacks what mlx-lm needs.
    """
    path = Path(folder) / CONFIG
    what = "An adapter folder cannot be used"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        expected = f"a folder with {CONFIG} and {WEIGHTS}"
        raise UserError(
            what,
            where=str(path),
            found="no such file",
            expected=expected,
            fix="name the whole folder, or make it anew: `dvc repro train`",
        ) from error
    except ValueError as error:
        raise UserError(what, where=str(path), found=error, expected="JSON") from error
    settings.setdefault("fine_tune_type", "lora")
    if settings["fine_tune_type"] == "full":
        return settings
    lora = settings.get("lora_parameters") or {}
    missing = [key for key in ("rank", "scale", "dropout") if key not in lora]
    missing += [] if "num_layers" in settings else ["num_layers"]
    if missing:
        raise UserError(
            what,
            where=str(path),
            found=f"no {', '.join(missing)}",
            expected="num_layers and lora_parameters with rank, scale, dropout (mlx-lm 0.20 on)",
            fix="add them to the file by the values the adapters were trained with",
        )
    return settings


def _read_weights(folder: Path) -> dict[str, mx.array]:
    path = Path(folder) / WEIGHTS
    what = "An adapter folder cannot be used"
    if not path.exists():
        raise UserError(what, where=str(path), found="no such file", expected=WEIGHTS)
    try:
        weights = mx.load(str(path))
        broken = sorted(name for name, array in weights.items() if not _finite(array))
    except RuntimeError as error:
        raise UserError(what, where=str(path), found=error, expected="safetensors") from error
    if broken:
        found = f"NaN or infinity in {listed(broken)}"
        raise UserError(what, where=str(path), found=found, expected="finite numbers")
    return weights


def _finite(array: mx.array) -> bool:
    return bool(mx.all(mx.isfinite(array)).item())


def _prepared(model: nn.Module) -> bool:
    """Whether `attach` (or mlx-lm) has chosen what is trained: adapter layers, or some layers only.

    Quantized modules freeze themselves, so a partly frozen quantized model may still be plain.
    """
    names = [name for name, _ in tree_flatten(model.parameters())]
    if any(name.endswith(".lora_a") for name in names):
        return True
    quantized = any(hasattr(module, "bits") for _, module in model.named_modules())
    return not quantized and 0 < len(trained(model)) < len(names)


def _compare(
    folder: Path, weights: dict[str, mx.array], expected: dict[str, mx.array], partial: bool
) -> None:
    """List every difference of names and shapes; `partial`: the folder may bring fewer arrays."""
    unknown = [f"{name}: only in the folder" for name in sorted(weights.keys() - expected.keys())]
    lacking = [f"{name}: only in the model" for name in sorted(expected.keys() - weights.keys())]
    shapes = [
        f"{name}: {tuple(weights[name].shape)} in the folder, {tuple(array.shape)} in the model"
        for name, array in sorted(expected.items())
        if name in weights and weights[name].shape != array.shape
    ]
    differences = shapes + unknown + ([] if partial else lacking)
    if differences:
        shown = "\n    ".join(differences[:MOST_LISTED])
        rest = len(differences) - MOST_LISTED
        raise UserError(
            "Adapters do not fit the model",
            where=str(folder),
            found=f"{len(differences)} differences\n    {shown}"
            + (f"\n    and {rest} more" if rest > 0 else ""),
            expected="the same names and shapes (rank, keys, num_layers, fine_tune_type, model)",
            fix="train with the settings in the folder's adapter_config.json, or use others",
        )
