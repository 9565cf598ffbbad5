"""Models of real shapes with random weights, made on the device: nothing is downloaded.

Widths and counts are those of the published configs of Qwen3 0.6B and 4B.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from stages.core.model.manifest import Manifest, Source

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
    },
    "qwen3-nano": {
        **_QWEN3,
        "vocab_size": 512,
        "head_dim": 16,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def build(name: str, dtype: str, seed: int = 0) -> nn.Module:
    """A model of mlx-lm's own class with its own random start, in `dtype`, evaluated."""
    config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)  # one by one: each is made in float32 first
    mx.clear_cache()
    return model


def manifest(name: str, dtype: str) -> Manifest:
    """What the model stage would say of it."""
    config = SHAPES[name]
    numbers = _parameters(config)
    return Manifest(
        name=name,
        source=Source("builtin", repo=f"random:{name}"),
        files={"random": {"sha256": name, "bytes": 0}},
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        embedding_rows=config["vocab_size"],
        dtype=dtype,
        quantization=None,
        tied=True,
        max_positions=config["max_position_embeddings"],
        parameters=numbers,
        bytes=numbers * {"bfloat16": 2, "float32": 4}[dtype],
        layer_keys=[],
        outer_keys=[],
        eos_token_ids=[],
        has_chat_template=False,
        system_role=False,
    )


def _parameters(config: dict[str, Any]) -> int:
    """Numbers in the model: embedding, layers with their norms, last norm."""
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = (head * config[f"num_{x}_heads"] for x in ("attention", "key_value"))
    attention = width * (2 * queries + 2 * keys) + 2 * head
    layer = attention + 3 * width * config["intermediate_size"] + 2 * width
    return config["vocab_size"] * width + config["num_hidden_layers"] * layer + width
