"""A GGUF file becomes an MLX folder: weights, config.json, tokenizer, chat template.

MLX reads Q4_0, Q4_1 and Q8_0 as its own quantized arrays (groups of 32). `model.dtype: stored`
keeps them so; `float32` and `bfloat16` unpack them, one array in memory at a time.
Layout and key names: github.com/ggml-org/ggml (docs/gguf.md) and llama.cpp's gguf-py constants.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.core import files
from stages.core.errors import UserError
from stages.core.model import tensors, vocabulary
from stages.core.model.vocabulary import FIX

GROUP_SIZE = 32
MOST_ENTRIES = 1_000_000

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""Readable architectures, and whether the q and k rows are permuted in the file."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Contents:
    """A GGUF file in memory.

    Attributes:
        architecture: `general.architecture`.
        metadata: Keys without the architecture's prefix; single numbers as Python's.
        arrays: By the file's names, quantized ones as `.weight`, `.scales`, `.biases`.
    """

    architecture: str
    metadata: dict[str, Any]
    arrays: dict[str, mx.array]

    def value(self, key: str) -> Any:
        """A value that the model cannot do without.

        Raises:
            UserError: The file does not have it.
        """
        if key not in self.metadata:
            raise UserError("The GGUF file lacks a value", where=key, expected="a value", fix=FIX)
        return self.metadata[key]


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the MLX folder of a GGUF file.

    Args:
        file: The GGUF file.
        folder: An existing empty folder for config.json, model.safetensors and the tokenizer.
        dtype: `model.dtype`: `stored` keeps quantized arrays packed; `float32` or `bfloat16`.

    Raises:
        UserError: No GGUF file, or an architecture, tokenizer or feature that is not known here.
        OSError: The folder cannot be written (a full disk among others).
    """
    contents = read(file)
    arrays = weights(contents)
    packed = bits_of(arrays)
    config = model_config(contents, arrays)
    if dtype == "stored":
        kind = _stored_type(arrays)
        config |= _quantization(packed)
    else:
        kind = getattr(mx, dtype)
        for name in packed:
            arrays[f"{name}.weight"] = _unpack(arrays, name, packed[name])
    config["torch_dtype"] = str(kind).removeprefix("mlx.core.")
    for name, array in arrays.items():
        arrays[name] = array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) else array
    contents.arrays.clear()
    vocabulary.write(folder, contents.metadata)
    files.write_json(folder / "config.json", config)
    tensors.write(folder / "model.safetensors", arrays)


def read(file: Path) -> Contents:
    """Read a GGUF file's metadata and arrays.

    Raises:
        UserError: It is no GGUF file, is cut off, or holds arrays MLX cannot read.
    """
    what = "The GGUF file cannot be read"
    with open(file, "rb") as opened:
        head = opened.read(24)
    magic, version, arrays, entries = struct.unpack("<4sIQQ", head.ljust(24, b"\0"))
    if magic != b"GGUF" or version not in (2, 3) or max(arrays, entries) > MOST_ENTRIES:
        found = f"first bytes {head[:8]!r}"
        raise UserError(what, where=file.name, found=found, expected="a GGUF file, version 2 or 3")
    try:
        loaded, metadata = mx.load(str(file), format="gguf", return_metadata=True)
    except RuntimeError as error:
        fix = f"fetch the file again; if it is whole, {FIX}"
        raise UserError(what, where=file.name, found=error, fix=fix) from error
    architecture = metadata.get("general.architecture", "")
    prefix = architecture + "."
    plain = {key.removeprefix(prefix): _plain(value) for key, value in metadata.items()}
    return Contents(architecture, plain, loaded)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, mx.array) else value


def weights(contents: Contents) -> dict[str, mx.array]:
    """The arrays by mlx-lm's names, q and k rows put back into Hugging Face's order, lazily.

    Raises:
        UserError: The architecture, a feature or an array is not known here.
    """
    _refuse_unknown(contents)
    permuted = ARCHITECTURES[contents.architecture]
    heads = contents.value("attention.head_count")
    rows = {"attn_q": heads, "attn_k": contents.metadata.get("attention.head_count_kv", heads)}
    found: dict[str, mx.array] = {}
    for name, array in contents.arrays.items():
        stem, leaf = name.rsplit(".", 1)
        if permuted and stem.rsplit(".", 1)[-1] in rows:
            array = unpermuted(array, rows[stem.rsplit(".", 1)[-1]])  # noqa: PLW2901
        found[f"{_renamed(stem)}.{leaf}"] = array
    return found


def unpermuted(array: mx.array, heads: int) -> mx.array:
    """Put the rows of a q or k projection back into the order of rotary halves.

    llama.cpp interleaves the two halves of each head (row 2i from the first, 2i+1 from the second)
    for its rotary layout; mlx-lm and Hugging Face rotate dimension i with i + size/2. Whole rows
    move, so packed weights, scales, biases and plain bias vectors are treated alike.

    Args:
        array: (heads × size, …) in the file's order.
        heads: Query heads for q, key-value heads for k.
    """
    columns = array.shape[1:]
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *columns)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def bits_of(arrays: dict[str, mx.array]) -> dict[str, int]:
    """Bits of each quantized module, by name: a group has 32 numbers, a packed word 32 bits."""
    names = [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]
    return {
        name: arrays[f"{name}.weight"].shape[-1] // arrays[f"{name}.scales"].shape[-1]
        for name in names
    }


def model_config(contents: Contents, arrays: dict[str, mx.array]) -> dict[str, Any]:
    """config.json in Hugging Face's words, without type and quantization."""
    heads = contents.value("attention.head_count")
    hidden = contents.value("embedding_length")
    metadata = contents.metadata
    return {
        "model_type": contents.architecture,
        "num_hidden_layers": contents.value("block_count"),
        "hidden_size": hidden,
        "intermediate_size": contents.value("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": metadata.get("attention.key_length", hidden // heads),
        "max_position_embeddings": contents.value("context_length"),
        "rms_norm_eps": contents.value("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "vocab_size": arrays["model.embed_tokens.weight"].shape[0],
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in arrays,
        "tie_word_embeddings": "lm_head.weight" not in arrays,
        **{
            f"{name}_token_id": metadata[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in metadata
        },
    }


def _refuse_unknown(contents: Contents) -> None:
    """Features whose weights would load and compute something else."""
    metadata = contents.metadata
    scaling = metadata.get("rope.scaling.type", "none")
    features = {
        f"architecture {contents.architecture}": contents.architecture not in ARCHITECTURES,
        f"rope scaling {scaling}": scaling != "none",
        "rope frequency factors": "rope_freqs.weight" in contents.arrays,
        "experts": metadata.get("expert_count", 0) > 0,
        "no embedding": "token_embd.weight" not in contents.arrays,
        "a sliding window": "attention.sliding_window" in metadata,
    }
    unknown = [name for name, there in features.items() if there]
    if unknown:
        raise UserError(
            "This kind of GGUF file cannot be converted",
            where="model.path",
            found=", ".join(unknown),
            expected="architecture " + ", ".join(ARCHITECTURES) + " with plain rotary positions",
            fix=FIX,
        )


def _renamed(stem: str) -> str:
    if stem in OUTER:
        return OUTER[stem]
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}"
    raise UserError(
        "The GGUF file holds an array that is not known here",
        where="model.path",
        found=stem,
        fix=FIX,
    )


def _stored_type(arrays: dict[str, mx.array]) -> mx.Dtype:
    """The type most bytes of the matrices have; norms follow it, as in mlx-lm's own conversions."""
    matrices = [array for array in arrays.values() if array.ndim > 1]
    sizes: Counter[mx.Dtype] = Counter()
    for array in matrices:
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.nbytes
    return sizes.most_common(1)[0][0]


def _quantization(packed: dict[str, int]) -> dict[str, Any]:
    """The `quantization` entry of config.json: the usual bits, and the modules that differ."""
    if not packed:
        return {}
    usual = Counter(packed.values()).most_common(1)[0][0]
    others = {
        name: {"group_size": GROUP_SIZE, "bits": bits}
        for name, bits in packed.items()
        if bits != usual
    }
    return {"quantization": {"group_size": GROUP_SIZE, "bits": usual, **others}}


def _unpack(arrays: dict[str, mx.array], name: str, bits: int) -> mx.array:
    """Numbers of a quantized array in float32 (its scales widened first); takes its parts away."""
    scales = arrays.pop(f"{name}.scales").astype(mx.float32)
    biases = arrays.pop(f"{name}.biases").astype(mx.float32)
    return mx.dequantize(arrays[f"{name}.weight"], scales, biases, group_size=GROUP_SIZE, bits=bits)
