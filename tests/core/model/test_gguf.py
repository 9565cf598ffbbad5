"""GGUF → MLX folder, against a hand-written file, NumPy's rotary positions and mlx-lm itself."""

import errno
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from stages.core import files
from stages.core.errors import UserError
from stages.core.model import gguf, tensors, tiny
from stages.core.model.tokenizers import load_tokenizer
from tests.core import gguf_file

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
MERGED = ["he", "ll", "12"]
MARKS = ["<|end|>", "<|turn|>"]
WORDS = MARKS + tiny.byte_letters() + MERGED
NAMES = dict(gguf.OUTER) | {
    f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}"
    for i in range(LAYERS)
    for ours, theirs in gguf.LAYER.items()
}
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}<|end|>{% endfor %}"


def metadata(**changes):
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 128,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(WORDS) - 2),
        "tokenizer.ggml.merges": ["h e", "l l", "1 2"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


def interleave(rows, heads):
    """Rows as GGUF has them: within a head, 2i from the first half and 2i + 1 from the second."""
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def parameters(random):
    """A random Llama by Hugging Face's names and order of rows."""
    shapes = {
        "attn_q": (HEADS * SIZE, HIDDEN),
        "attn_k": (KV_HEADS * SIZE, HIDDEN),
        "attn_v": (KV_HEADS * SIZE, HIDDEN),
        "attn_output": (HIDDEN, HEADS * SIZE),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    found = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,)}
    found |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}
    return {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in found.items()}


def in_file_order(name, array):
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.rsplit(".", 1)[-1])
    return array if heads is None else interleave(array, heads)


def write_file(path, weights, **changes):
    arrays = {
        f"{name}.weight": gguf_file.plain(in_file_order(name, array))
        for name, array in weights.items()
    }
    gguf_file.write(path, metadata(**changes), arrays)
    return path


def rotated(vector, position, pairs):
    """Rotary positions in float64: pair i turns by position / 10000^(2i/size)."""
    out = np.array(vector, dtype=np.float64)
    for i, (a, b) in enumerate(pairs):
        angle = position / 10000 ** (2 * i / len(vector))
        out[a] = vector[a] * np.cos(angle) - vector[b] * np.sin(angle)
        out[b] = vector[a] * np.sin(angle) + vector[b] * np.cos(angle)
    return out


def test_unpermuted_rows_rotated_by_halves_score_as_the_file_rotated_by_neighbours():
    random = np.random.default_rng(0)
    file_q, file_k = random.normal(size=(2, HEADS * SIZE, HIDDEN))
    x, y = random.normal(size=(2, HIDDEN))
    neighbours = [(2 * i, 2 * i + 1) for i in range(SIZE // 2)]
    halves = [(i, i + SIZE // 2) for i in range(SIZE // 2)]

    def scores(q, k, pairs):
        q, k = (q @ x).reshape(HEADS, SIZE), (k @ y).reshape(HEADS, SIZE)
        return [rotated(q[h], 7, pairs) @ rotated(k[h], 3, pairs) for h in range(HEADS)]

    back = [np.array(gguf.unpermuted(mx.array(rows), HEADS)) for rows in (file_q, file_k)]
    assert np.allclose(scores(file_q, file_k, neighbours), scores(*back, halves), rtol=0, atol=1e-4)
    assert not np.allclose(scores(file_q, file_k, halves), scores(*back, halves), atol=1e-1)


def test_a_converted_file_computes_what_the_original_weights_compute(tmp_path):
    weights = parameters(np.random.default_rng(1))
    folder = tmp_path / "model"
    folder.mkdir()
    gguf.convert(write_file(tmp_path / "m.gguf", weights), folder, "stored")
    model, config = load_model(folder)
    reference = llama.Model(llama.ModelArgs.from_dict(config))
    reference.load_weights([(f"{NAMES[k]}.weight", mx.array(v)) for k, v in weights.items()])
    tokens = mx.array([[3, 70, 71, 9, 200, 40]])
    assert config["torch_dtype"] == "float32"
    assert mx.array_equal(model(tokens), reference(tokens))


def test_the_file_read_with_neighbour_rotation_computes_the_same(tmp_path):
    """mlx-lm can rotate as GGUF does (rope_traditional): another road to the same numbers."""
    path = write_file(tmp_path / "m.gguf", parameters(np.random.default_rng(2)))
    folder = tmp_path / "model"
    folder.mkdir()
    gguf.convert(path, folder, "float32")
    model, config = load_model(folder)
    other = llama.Model(llama.ModelArgs.from_dict({**config, "rope_traditional": True}))
    raw = mx.load(str(path)).items()
    other.load_weights([(f"{NAMES[k.removesuffix('.weight')]}.weight", v) for k, v in raw])
    tokens = mx.array([[3, 70, 71, 9, 200, 40]])
    assert mx.allclose(model(tokens), other(tokens), rtol=0, atol=1e-5)


@pytest.fixture
def packed(tmp_path):
    """A file whose matrices are Q4_0, Q4_1 and Q8_0, and its numbers by the formulas."""
    random = np.random.default_rng(3)
    arrays, numbers = {}, {}
    kinds = {"attn_q": "Q4_0", "attn_k": "Q8_0", "ffn_down": "Q4_0", "token_embd": "Q8_0"}
    for name, array in parameters(random).items():
        leaf = name.rsplit(".", 1)[-1]
        if array.ndim == 1:
            arrays[f"{name}.weight"], numbers[name] = gguf_file.plain(array), array
        else:
            kind = kinds.get(leaf, "Q4_1")
            entry, numbers[name] = gguf_file.quantized(kind, array.shape, random)
            arrays[f"{name}.weight"] = entry
    gguf_file.write(tmp_path / "packed.gguf", metadata(), arrays)
    return tmp_path / "packed.gguf", numbers


def test_unpacked_numbers_are_those_of_the_formulas(packed, tmp_path):
    path, numbers = packed
    folder = tmp_path / "model"
    folder.mkdir()
    gguf.convert(path, folder, "float32")
    found = mx.load(str(folder / "model.safetensors"))
    rows = numbers["blk.1.attn_q"]
    q = np.array(found["model.layers.1.self_attn.q_proj.weight"])
    assert np.array_equal(interleave(q, HEADS), rows)
    k = np.array(found["model.layers.0.self_attn.k_proj.weight"])
    assert np.array_equal(interleave(k, KV_HEADS), numbers["blk.0.attn_k"])
    up = np.array(found["model.layers.0.mlp.up_proj.weight"])
    assert np.allclose(up, numbers["blk.0.ffn_up"], rtol=0, atol=1e-7)
    assert np.array_equal(np.array(found["model.embed_tokens.weight"]), numbers["token_embd"])
    assert {array.dtype for array in found.values()} == {mx.float32}


def test_stored_keeps_weights_packed_and_mlx_lm_reads_them(packed, tmp_path):
    path, numbers = packed
    folder = tmp_path / "model"
    folder.mkdir()
    gguf.convert(path, folder, "stored")
    model, config = load_model(folder)
    assert config["quantization"]["bits"] == 4
    assert model.model.embed_tokens.bits == 8
    assert model.model.norm.weight.dtype == mx.float16
    q = model.layers[1].self_attn.q_proj
    numbers_q = mx.dequantize(q.weight, q.scales, q.biases, group_size=32, bits=4)
    assert np.allclose(
        interleave(np.array(numbers_q, dtype=np.float32), HEADS),
        numbers["blk.1.attn_q"],
        rtol=2e-3,
        atol=2e-4,
    )


def test_bfloat16_is_written_as_such(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_file(tmp_path / "m.gguf", parameters(np.random.default_rng(4)))
    gguf.convert(path, folder, "bfloat16")
    found = mx.load(str(folder / "model.safetensors"))
    assert {array.dtype for array in found.values()} == {mx.bfloat16}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_tokenizer_merges_splits_digits_and_keeps_marks(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_file(tmp_path / "m.gguf", parameters(np.random.default_rng(5)))
    gguf.convert(path, folder, "stored")
    tokenizer = load_tokenizer(folder)
    first = len(MARKS)
    byte = {value: first + value for value in range(256)}
    he, ll = first + 256, first + 257
    assert tokenizer("hello")["input_ids"] == [he, ll, byte[ord("o")]]
    # SmolLM cuts between digits before merging, so "1 2" is never merged
    assert tokenizer("12")["input_ids"] == [byte[ord("1")], byte[ord("2")]]
    assert tokenizer("<|turn|>é")["input_ids"] == [1, byte[0xC3], byte[0xA9]]
    assert tokenizer.decode(tokenizer("naïve — 日本 🙂")["input_ids"]) == "naïve — 日本 🙂"
    turns = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<|turn|>he<|end|>"
    assert tokenizer.eos_token_id == 0


def test_other_families_cut_digits_as_they_do(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = parameters(np.random.default_rng(6))
    path = write_file(
        tmp_path / "m.gguf",
        weights,
        **{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": True},
    )
    gguf.convert(path, folder, "stored")
    twelve = len(MARKS) + 256 + 2
    assert load_tokenizer(folder)("12")["input_ids"] == [1, twelve]  # begins with the bos token


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma9"}, "gemma9"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.expert_count": 8}, "experts"),
        ({"tokenizer.ggml.pre": "other-pre"}, "other-pre"),
        ({"tokenizer.ggml.model": "llama"}, "llama"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, changes, named):
    path = write_file(tmp_path / "m.gguf", parameters(np.random.default_rng(7)), **changes)
    with pytest.raises(UserError) as caught:
        gguf.convert(path, tmp_path, "stored")
    assert named in caught.value.found
    assert "Hugging Face" in caught.value.fix


def test_a_file_that_is_cut_off_or_no_gguf_is_refused(tmp_path):
    path = write_file(tmp_path / "m.gguf", parameters(np.random.default_rng(8)))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="cannot be read"):
        gguf.read(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="cannot be read"):
        gguf.read(path)
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 3000)  # MLX itself would crash on this one
    with pytest.raises(UserError, match="cannot be read"):
        gguf.read(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError) as caught:
        gguf.read(path)
    assert "version" in caught.value.found


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    path = write_file(tmp_path / "m.gguf", parameters(np.random.default_rng(9)))

    def full(array):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors, "_raw", full)
    target = tmp_path / "cache" / "model"
    with pytest.raises(UserError, match="No space left"), files.replacing_folder(target) as folder:
        gguf.convert(path, folder, "float32")
    assert list(target.parent.iterdir()) == []
