"""Widths and counts of models whose weights are drawn: those of the published configs of Qwen3, and
two small ones for axes that a large one would take too long for. No MLX.
"""

from __future__ import annotations

from typing import Any

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
    "qwen3-mini": {
        **_QWEN3,
        "vocab_size": 8192,
        "head_dim": 64,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
