"""Facts about a model folder, from mlx-lm's own classes; no weight is read into memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.switch_layers import SwitchLinear

from stages.core.config.settings import nearest
from stages.core.errors import UserError
from stages.core.model import trainable
from stages.core.model.tokenizers import load_tokenizer, takes_system_turn


def load(folder: Path, dtype: str = "stored") -> tuple[nn.Module, dict]:
    """Load a model with mlx-lm, in the type that `model.dtype` asks for; arrays stay unread.

    Args:
        folder: MLX or Hugging Face folder.
        dtype: `stored`, `float32` or `bfloat16`: the type of all floating arrays (scales and
            biases of quantized weights too, their packed numbers stay), but for those that mlx-lm
            keeps wide for the architecture.

    Raises:
        UserError: The architecture is unknown, or config.json and weights do not fit together.
    """
    _refuse_unknown(folder)
    try:
        model, config = utils.load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UserError(
            "The model's weights and its config.json do not fit together",
            where=folder.name,
            found=f"{type(error).__name__}: {lines[0][:300]}",
            expected="weights as mlx-lm's class for this model_type wants them",
            fix="fetch the model again; if it is whole, mlx-lm cannot load it",
        ) from error
    if dtype != "stored":
        cast(model, getattr(mx, dtype))
    return model, config


def refuse_narrow_experts(model: nn.Module, folder: Path) -> None:
    """Refuse what MLX's CPU backend would end in: its product of chosen experts is float32 only.

    Quantized experts take another way, which has all types.

    Raises:
        UserError: The device is the CPU, and experts are 16 bits wide.
    """
    if mx.default_device() != mx.cpu:
        return
    for name, module in model.named_modules():
        if isinstance(module, SwitchLinear) and module.weight.dtype != mx.float32:
            raise UserError(
                "On a CPU, MLX computes a mixture of experts in float32 only",
                where=f"{folder.name}, {name}",
                found=str(module.weight.dtype).removeprefix("mlx.core."),
                expected="float32, or quantized weights",
                fix="set model.dtype=float32, or use a GPU",
            )


def facts(folder: Path, dtype: str) -> dict[str, Any]:
    """What a Manifest says about a folder beyond its source, by the Manifest's field names.

    Raises:
        UserError: See `load`; or the tokenizer cannot be loaded.
    """
    model, config = load(folder, dtype)
    tokenizer = load_tokenizer(folder)
    parameters = dict(tree_flatten(model.parameters()))
    rows, width = _embedding(model)
    text = config.get("text_config") or {}
    hidden = config.get("hidden_size") or text.get("hidden_size") or width
    ends = config.get("eos_token_id") or text.get("eos_token_id") or tokenizer.eos_token_id
    return {
        "model_type": config["model_type"],
        "num_layers": len(model.layers),
        "hidden_size": hidden,
        "vocab_size": len(tokenizer),
        "embedding_rows": rows,
        "dtype": _usual_dtype(parameters),
        "quantization": _quantization(model),
        "tied": not trainable.has_head(model),
        "max_positions": config.get("max_position_embeddings")
        or text.get("max_position_embeddings"),
        "parameters": utils.get_total_parameters(model),
        "bytes": sum(array.nbytes for array in parameters.values()),
        "layer_keys": trainable.layer_keys(model),
        "outer_keys": trainable.outer_keys(model),
        "eos_token_ids": sorted(_listed(ends)),
        "has_chat_template": bool(tokenizer.chat_template),
        "system_role": takes_system_turn(tokenizer),
    }


def _refuse_unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        utils._get_classes(config)
    except ValueError as error:
        model_type = config["model_type"]
        own_code = "auto_map" in config
        models = Path(mlx_lm.models.__path__[0])
        known = sorted(path.stem for path in models.glob("*.py"))
        close = nearest(model_type, known)
        raise UserError(
            f"mlx-lm has no architecture {model_type}"
            + (", and the code that comes with the model is never run" if own_code else ""),
            where=f"{folder.name}/config.json, model_type",
            found=model_type + (", auto_map" if own_code else ""),
            expected="an architecture of mlx_lm.models" + (f", such as {close}" if close else ""),
            fix="choose another model",
        ) from error


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Bring all floating arrays to one type, but for those that the architecture keeps wide."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)
    arrays = [
        (name, array.astype(dtype))
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating) and may_cast(name)
    ]
    model.load_weights(arrays, strict=False)


def _embedding(model: nn.Module) -> tuple[int, int]:
    """Rows and width of the token embedding: the largest one there is."""
    sizes = [
        (module.weight.shape[0], module.weight.shape[1] * 32 // getattr(module, "bits", 32))
        for _, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    if not sizes:
        raise UserError(
            "The model has no token embedding, so it is no language model for fine-tuning",
            where="model.repo, model.path",
        )
    return max(sizes)


def _usual_dtype(parameters: dict[str, mx.array]) -> str:
    sizes: Counter[str] = Counter()
    for array in parameters.values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    return sizes.most_common(1)[0][0]


def _quantization(model: nn.Module) -> dict[str, int] | None:
    """Bits and group size that most quantized modules have, or None."""
    kinds = Counter(
        (module.bits, module.group_size)
        for _, module in model.named_modules()
        if hasattr(module, "bits") and hasattr(module, "group_size")
    )
    if not kinds:
        return None
    bits, group_size = kinds.most_common(1)[0][0]
    return {"bits": bits, "group_size": group_size}


def _listed(ends: int | list[int] | None) -> list[int]:
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]
