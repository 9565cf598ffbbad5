"""`builtin:tiny`: a random 4-layer Llama with a byte-level tokenizer, made offline in a moment.

Weights come from NumPy's raw random bits, not from `mx.random`, so the files have the same bytes on
every machine. It knows nothing; it is for trying out the pipeline and for tests.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.core import files
from stages.core.model import tensors

SEED = 20240
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 4, 64, 4, 2, 160
POSITIONS = 16384
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 256 + len(SPECIAL)
END, TURN_END = SPECIAL[0], SPECIAL[2]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(folder: Path) -> None:
    """Write the model's folder (config.json, model.safetensors, tokenizer) into `folder`."""
    files.write_json(folder / "config.json", model_config())
    tensors.write(folder / "model.safetensors", weights())
    files.write_json(folder / "tokenizer.json", tokenizer())
    files.write_json(folder / "tokenizer_config.json", tokenizer_config())


def model_config() -> dict[str, Any]:
    """config.json of the Llama; token ids of the end of a turn and of padding included."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 256 + SPECIAL.index(END),
        "eos_token_id": 256 + SPECIAL.index(TURN_END),
        "pad_token_id": 256 + SPECIAL.index("<|pad|>"),
    }


def weights() -> dict[str, mx.array]:
    """All arrays by mlx-lm's names, float32: uniform of variance 1/columns, norms at 1."""
    random = np.random.PCG64(SEED)

    def matrix(rows: int, columns: int) -> mx.array:
        bits = (random.random_raw(rows * columns) >> 40).reshape(rows, columns)  # 24 random bits
        limit = math.sqrt(3 / columns)
        return mx.array(((bits / 2**23 - 1) * limit).astype(np.float32))

    size = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * size, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * size, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    arrays = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        for name, shape in shapes.items():
            arrays[f"model.layers.{i}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"model.layers.{i}.{name}.weight"] = mx.ones(HIDDEN)
    return {**arrays, "model.norm.weight": mx.ones(HIDDEN)}


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: one token per byte of UTF-8 (byte-level BPE without merges), four specials.

    Token i below 256 is byte i.
    """
    letters = byte_letters()
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {letters[i]: i for i in range(256)},
            "merges": [],
        },
    }


def byte_letters() -> list[str]:
    """The visible letter that stands for each byte in byte-level BPE (GPT-2's table).

    Printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)
    ]


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": TURN_END,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
