"""Models of real shapes with random weights, made on the device: nothing is downloaded.

`bits`: quantized as mlx-lm's own converter does it, groups of 64.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from benchmarks.widths import SHAPES
from stages.core.model.manifest import Manifest, Source

GROUP = 64
"""Numbers that share a scale where weights are quantized."""
BYTES = {"bfloat16": 2, "float32": 4}


def build(name: str, dtype: str, seed: int = 0, bits: int | None = None) -> nn.Module:
    """A model of mlx-lm's own class with its own random start, in `dtype`, evaluated.

    Args:
        bits: Of quantized weights; None: none is quantized.
    """
    config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)  # one by one: each is made in float32 first
    if bits is not None:
        nn.quantize(model, GROUP, bits, class_predicate=_quantizable)
        for _, array in tree_flatten(model.parameters()):
            mx.eval(array)
    mx.clear_cache()
    return model


def manifest(name: str, dtype: str, bits: int | None = None) -> Manifest:
    """What the model stage would say of it."""
    config = SHAPES[name]
    file = name if bits is None else f"{name}-{bits}bit"
    return Manifest(
        name=file,
        source=Source("builtin", repo=f"random:{name}"),
        files={"random": {"sha256": file, "bytes": 0}},
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        embedding_rows=config["vocab_size"],
        dtype=dtype,
        quantization=None if bits is None else {"bits": bits, "group_size": GROUP},
        tied=True,
        max_positions=config["max_position_embeddings"],
        parameters=sum(rows * columns for rows, columns in _arrays(config)),
        bytes=sum(_bytes(rows, columns, BYTES[dtype], bits) for rows, columns in _arrays(config)),
        layer_keys=[],
        outer_keys=[],
        eos_token_ids=[],
        has_chat_template=False,
        system_role=False,
    )


def _quantizable(_path: str, module: nn.Module) -> bool:
    """As mlx-lm's converter: whole groups only."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP == 0


def _arrays(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(rows, columns) of every array; a norm has one row."""
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = (head * config[f"num_{x}_heads"] for x in ("attention", "key_value"))
    inner = config["intermediate_size"]
    layer = [(queries, width), (keys, width), (keys, width), (width, queries)]
    layer += [(inner, width), (inner, width), (width, inner)]
    layer += [(1, head), (1, head), (1, width), (1, width)]
    return [(config["vocab_size"], width), *layer * config["num_hidden_layers"], (1, width)]


def _bytes(rows: int, columns: int, size: int, bits: int | None) -> int:
    """Of one array; quantized: packed numbers, and a scale and a bias for each group."""
    if bits is None or rows == 1 or columns % GROUP:
        return rows * columns * size
    return rows * columns * bits // 8 + 2 * size * rows * columns // GROUP
