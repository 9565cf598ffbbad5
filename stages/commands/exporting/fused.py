"""A model with the adapter inside its weights, by mlx-lm's own fuse methods."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils

from stages.commands.exporting.subject import Subject
from stages.core import files
from stages.core.errors import UserError, listed
from stages.core.model import architecture, sources
from stages.core.model.tokenizers import read_template
from stages.core.update import adapters

OWN = ("config.json", "model.safetensors.index.json")
"""Files of the base that are written anew, besides the weights."""


def write(subject: Subject, folder: Path, bits: int | None, dtype: str | None) -> None:
    """Write the fused model into an empty folder, with tokenizer and template.

    Args:
        bits: Quantize to so many bits; None: no quantized weights, whatever the base has.
        dtype: Type of the weights before quantization; None: the base's.

    Raises:
        UserError: mlx-lm cannot fuse a module of this model.
        OSError: The disk is full.
    """
    model, config = subject.load()
    if dtype is not None:  # from the run's own type, not from what the files hold
        architecture.cast(model, getattr(mx, dtype))
    adapters.load(subject.adapters, model)
    as_base = bits is not None and bits == (subject.manifest.quantization or {}).get("bits")
    _fuse(model, dequantize=not as_base)
    if not as_base:
        model = utils.dequantize_model(model)
        config = {key: value for key, value in config.items() if not key.startswith("quantization")}
        _refuse_packed(model)
    if bits is not None and not as_base:
        with contextlib.redirect_stdout(sys.stderr):
            model, config = utils.quantize_model(model, config, None, bits)
    _name_type(config, model)
    vision = "vision_tower" in getattr(model, "model", {})
    _save(folder, model)
    utils.save_config(config, folder / "config.json", keep_vision_config=vision)
    _copy_beside(subject, folder)


def _fuse(model: nn.Module, dequantize: bool) -> None:
    fused = [
        (name, module.fuse(dequantize=dequantize))
        for name, module in model.named_modules()
        if hasattr(module, "fuse")
    ]
    if fused:
        model.update_modules(tree_unflatten(fused))
    left = [name for name, _ in tree_flatten(model.parameters()) if name.endswith(".lora_a")]
    if left:
        raise UserError(
            "mlx-lm cannot fuse these adapter layers",
            where="--fused",
            found=listed(left),
            fix="export the adapter itself: --adapter FOLDER",
        )


def _refuse_packed(model: nn.Module) -> None:
    packed = [name for name, module in model.named_modules() if hasattr(module, "bits")]
    if packed:
        raise UserError(
            "mlx-lm cannot unpack these quantized modules",
            where="--fused",
            found=listed(packed),
            fix="add --bits with the base's own bits, or export the adapter: --adapter FOLDER",
        )


def _name_type(config: dict[str, Any], model: nn.Module) -> None:
    """Let config.json name the type of the weights as they are, where it names one at all."""
    floating = [
        x for _, x in tree_flatten(model.parameters()) if mx.issubdtype(x.dtype, mx.floating)
    ]
    largest = max(floating, key=lambda array: array.nbytes)
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = str(largest.dtype).removeprefix("mlx.core.")


def _save(folder: Path, model: nn.Module) -> None:
    try:
        utils.save_model(folder, model, donate_model=True)
    except RuntimeError as error:  # mx.save_safetensors says no more about a full disk
        raise UserError(
            "The fused model cannot be written",
            where=str(folder.parent),
            found=f"{error}; {files.free_gb(folder):.2f} GB free",
            fix="free some space, then run again",
        ) from error


def _copy_beside(subject: Subject, folder: Path) -> None:
    """Tokenizer, generation settings and the template that was trained with."""
    for file in sources.used_files(subject.folder):
        if file.name not in OWN and not file.match(sources.WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    template = subject.settings.tokenize.chat_template
    if template is not None:
        files.write_text(folder / "chat_template.jinja", read_template(template))
