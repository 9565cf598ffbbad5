"""Adapters: drawn as mlx-lm draws them, saved as it reads them, refused when they do not fit."""

import json
import sys

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import fuse, load
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import save_config

from stages.core.config import schema
from stages.core.errors import RunFailed, UserError
from stages.core.model import models, tiny
from stages.core.update import adapters

TOKENS = mx.array([[72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    tiny.write(folder)
    return folder


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("root"))
        return models.build_manifest(schema.Model(repo="builtin:tiny"))


def settings(kind="lora", layers=2, **lora):
    return schema.Train(
        fine_tune_type=kind,
        num_layers=layers,
        lora_parameters=schema.LoraParameters(**{"rank": 4, **lora}),
        seed=7,
    )


def perturbed(model):
    """Move every trained array by random numbers, so that the adapters change the output."""
    keys = mx.random.split(mx.random.key(3), 200)
    moved = [
        (name, array + 0.05 * mx.random.normal(array.shape, key=keys[i]))
        for i, (name, array) in enumerate(sorted(adapters.trained(model).items()))
    ]
    model.load_weights(moved, strict=False)
    return model


def tuned(base, train):
    model, _ = models.load_model(base)
    attached = adapters.attach(model, train)
    return perturbed(model), attached


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_mlx_lm_loads_what_we_save(base, manifest, tmp_path, kind):
    model, _ = tuned(base, settings(kind))
    adapters.save(tmp_path / "adapters", adapters.trained(model), manifest, settings(kind))
    theirs, _ = load(str(base), adapter_path=str(tmp_path / "adapters"))
    plain, _ = models.load_model(base)
    assert mx.array_equal(theirs(TOKENS), model(TOKENS))
    assert mx.abs(plain(TOKENS) - model(TOKENS)).max() > 0.01


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_we_load_what_we_save(base, manifest, tmp_path, kind):
    model, _ = tuned(base, settings(kind, layers=-1, keys=None))
    adapters.save(tmp_path, adapters.trained(model), manifest, settings(kind, layers=-1))
    again, _ = models.load_model(base)
    adapters.load(tmp_path, again)
    assert mx.array_equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_mlx_lm_fuse_takes_the_folder(base, manifest, tmp_path, monkeypatch, kind):
    model, _ = tuned(base, settings(kind))
    adapters.save(tmp_path / "adapters", adapters.trained(model), manifest, settings(kind))
    words = ["--model", str(base), "--adapter-path", str(tmp_path / "adapters")]
    monkeypatch.setattr(sys, "argv", ["fuse", *words, "--save-path", str(tmp_path / "fused")])
    fuse.main()
    fused, _ = load(str(tmp_path / "fused"))
    assert mx.allclose(fused(TOKENS), model(TOKENS), rtol=0, atol=1e-4)


def test_initial_values_are_those_of_mlx_lm_from_the_same_seed(base):
    ours, _ = models.load_model(base)
    adapters.attach(ours, settings(rank=8))
    theirs, _ = models.load_model(base)
    theirs.freeze()
    mx.random.seed(7)
    linear_to_lora_layers(theirs, 2, {"rank": 8, "scale": 20.0, "dropout": 0.0})
    other, _ = models.load_model(base)
    train = settings(rank=8)
    train.seed = 8
    adapters.attach(other, train)
    expected = dict(tree_flatten(theirs.trainable_parameters()))
    found = adapters.trained(ours)
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
    name = "model.layers.3.mlp.up_proj.lora_a"
    assert not mx.array_equal(adapters.trained(other)[name], expected[name])


def test_what_is_trained_is_counted(base):
    _, attached = tuned(base, settings(rank=4))
    # rank × (columns + rows): q 64+64, k and v 64+32, o 64+64, gate, up and down 64+160
    layer = 4 * (128 + 96 + 96 + 128 + 3 * 224)
    assert attached.trained_parameters == 2 * layer
    assert attached.total_parameters == 260 * 64 + 4 * (12288 + 3 * 10240 + 128) + 64
    assert (attached.cut, attached.num_layers_trained) == (2, 2)
    assert not attached.head_trained
    assert not attached.embeddings_trained
    _, dora = tuned(base, settings("dora", rank=4))
    assert dora.trained_parameters == 2 * (layer + 64 + 32 + 32 + 64 + 160 + 160 + 64)
    _, full = tuned(base, settings("full", layers=1))
    assert full.trained_parameters == 12288 + 3 * 10240 + 128
    assert full.cut == 3
    _, everything = tuned(base, settings("full", layers=-1))
    assert (everything.cut, everything.num_layers_trained) == (0, 4)


def test_keys_choose_modules_and_an_embedding_reaches_below_all_layers(base):
    model, attached = tuned(base, settings(keys=["self_attn.q_proj"]))
    assert {name.split(".", 3)[3] for name in adapters.trained(model)} == {
        "self_attn.q_proj.lora_a",
        "self_attn.q_proj.lora_b",
    }
    assert attached.cut == 2
    _, below = tuned(base, settings(keys=["self_attn.q_proj", "model.embed_tokens"]))
    assert below.embeddings_trained
    assert below.head_trained  # tied
    assert below.cut == 0


def test_a_key_that_names_nothing_is_refused_with_the_nearest(base):
    with pytest.raises(UserError) as caught:
        tuned(base, settings(keys=["self_attn.q_prj"]))
    assert caught.value.found == "self_attn.q_prj"
    assert "self_attn.q_proj" in caught.value.fix


def test_more_layers_than_there_are_is_refused(base):
    with pytest.raises(UserError) as caught:
        tuned(base, settings(layers=5))
    assert (caught.value.found, caught.value.expected) == ("5", "1 to 4, or -1 for all")


def test_full_on_quantized_weights_is_refused_and_lora_is_not(base, manifest, tmp_path):
    model, _ = models.load_model(base)
    nn.quantize(model, group_size=32, bits=4)
    with pytest.raises(UserError, match="not quantized"):
        adapters.attach(model, settings("full"))
    adapters.attach(model, settings())
    perturbed(model)
    adapters.save(tmp_path, adapters.trained(model), manifest, settings())
    again, _ = models.load_model(base)
    nn.quantize(again, group_size=32, bits=4)
    adapters.load(tmp_path, again)
    assert mx.array_equal(again(TOKENS), model(TOKENS))


def test_bytes_depend_on_content_alone_and_name_no_machine_path(base, manifest, tmp_path):
    model, _ = tuned(base, settings())
    weights = adapters.trained(model)
    adapters.save(tmp_path / "a", weights, manifest, settings())
    adapters.save(tmp_path / "b" / "c", dict(reversed(weights.items())), manifest, settings())
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / "c" / name).read_bytes()
    assert "/" not in (tmp_path / "a" / "adapter_config.json").read_text()
    assert len(weights) == 2 * 2 * 7  # saving takes nothing away from the caller


def test_nan_is_never_saved(base, manifest, tmp_path):
    model, _ = tuned(base, settings())
    weights = adapters.trained(model)
    name = sorted(weights)[0]
    weights[name] = weights[name] * float("nan")
    with pytest.raises(RunFailed) as caught:
        adapters.save(tmp_path / "adapters", weights, manifest, settings())
    assert name in caught.value.found
    assert not (tmp_path / "adapters").exists()


def saved_by_mlx_lm(base, folder, kind, rank=4, layers=2):
    """An adapter folder written in mlx-lm's own way (`mlx_lm.lora.train_model`)."""
    model, _ = load(str(base))
    model.freeze()
    lora = {"rank": rank, "scale": 20.0, "dropout": 0.0}
    if kind == "full":
        for layer in model.layers[-layers:]:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, layers, lora, use_dora=kind == "dora")
    perturbed(model)
    folder.mkdir()
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": layers, "model": str(base), "iters": 10}
    config |= {"lora_parameters": None if kind == "full" else lora}
    save_config(config, folder / "adapter_config.json")
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_a_folder_of_mlx_lm_is_loaded_and_starts_a_run(base, tmp_path, kind):
    theirs = saved_by_mlx_lm(base, tmp_path / "theirs", kind)
    plain, _ = models.load_model(base)
    adapters.load(tmp_path / "theirs", plain)
    assert mx.array_equal(plain(TOKENS), theirs(TOKENS))
    warm, _ = models.load_model(base)
    adapters.attach(warm, settings(kind))
    adapters.load(tmp_path / "theirs", warm)
    assert mx.array_equal(warm(TOKENS), theirs(TOKENS))
    assert adapters.trained(warm).keys() == dict(tree_flatten(theirs.trainable_parameters())).keys()


def test_a_warm_start_of_another_rank_lists_shapes(base, tmp_path):
    saved_by_mlx_lm(base, tmp_path / "theirs", "lora", rank=2)
    model, _ = tuned(base, settings(rank=8))
    before = model(TOKENS)
    with pytest.raises(UserError) as caught:
        adapters.load(tmp_path / "theirs", model)
    lines = caught.value.found.splitlines()
    assert lines[0] == "28 differences"
    assert lines[1].strip() == (
        "model.layers.2.mlp.down_proj.lora_a: (160, 2) in the folder, (160, 8) in the model"
    )
    assert lines[-1].strip() == "and 20 more"
    assert mx.array_equal(model(TOKENS), before)


@pytest.mark.parametrize(
    ("kind", "layers", "named"),
    [
        ("lora", 1, "model.layers.2.mlp.down_proj.lora_a: only in the folder"),
        ("lora", 3, "model.layers.1.mlp.down_proj.lora_a: only in the model"),
        ("dora", 2, "model.layers.2.mlp.down_proj.m: only in the model"),
        ("full", 2, "model.layers.2.mlp.down_proj.lora_a: only in the folder"),
    ],
)
def test_a_warm_start_of_other_arrays_lists_names(base, tmp_path, kind, layers, named):
    saved_by_mlx_lm(base, tmp_path / "theirs", "lora")
    model, _ = tuned(base, settings(kind, layers=layers))
    with pytest.raises(UserError) as caught:
        adapters.load(tmp_path / "theirs", model)
    assert named in caught.value.found
    assert caught.value.where == str(tmp_path / "theirs")


def test_a_folder_that_is_no_adapter_folder_is_said(base, tmp_path):
    model, _ = models.load_model(base)
    with pytest.raises(UserError) as caught:
        adapters.load(tmp_path, model)
    assert "adapter_config.json" in caught.value.where
    old = {"lora_layers": 2, "lora_parameters": {"rank": 4, "alpha": 8, "dropout": 0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(old))
    with pytest.raises(UserError) as caught:
        adapters.load(tmp_path, model)
    assert caught.value.found == "no scale, num_layers"


def test_an_adapter_with_nan_is_refused(base, tmp_path):
    saved_by_mlx_lm(base, tmp_path / "theirs", "lora")
    file = str(tmp_path / "theirs" / "adapters.safetensors")
    weights = dict(mx.load(file))
    name = "model.layers.3.mlp.up_proj.lora_b"
    weights[name] = mx.full(weights[name].shape, float("nan"))
    mx.save_safetensors(file, weights)
    model, _ = models.load_model(base)
    with pytest.raises(UserError) as caught:
        adapters.load(tmp_path / "theirs", model)
    assert name in caught.value.found


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
WHOLE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


@pytest.mark.parametrize(
    ("weights", "found", "expected"),
    [
        (WHOLE[:-1], "69 bytes", "70 bytes"),  # 8 of the length, 54 of the header, 8 of the array
        (WHOLE[:30], "30 bytes", "62 bytes"),
        (b"", "0 bytes", "8 bytes"),
        (WHOLE + b"x", "71 bytes", "70 bytes"),
        (b"version https://git-lfs", "a header that is none", "safetensors"),
        (b"\x02" + bytes(7) + b"[]", "a header that is none", "safetensors"),
        (None, "no such file", "adapters.safetensors"),
    ],
    ids=["array cut", "header cut", "empty", "longer", "pointer", "list", "missing"],
)
def test_torn_weights_are_refused_by_their_header(tmp_path, weights, found, expected):
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
    if weights is not None:
        (tmp_path / "adapters.safetensors").write_bytes(weights)
    with pytest.raises(UserError) as caught:
        adapters.check(tmp_path)
    record = caught.value.record()
    assert record["found"].startswith(found) and record["expected"].startswith(expected)
    assert record["where"].endswith("adapters.safetensors") and "dvc repro train" in record["fix"]


def test_whole_weights_are_taken_and_a_missing_config_is_named(tmp_path):
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"a": mx.ones((3, 5))})
    with pytest.raises(UserError) as caught:
        adapters.check(tmp_path)
    assert caught.value.record()["where"].endswith("adapter_config.json")
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
    adapters.check(tmp_path)


@pytest.mark.parametrize("user", ["export", "evaluate", "chat"])
def test_a_torn_adapter_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch, user):
    from types import SimpleNamespace

    from stages.commands import chat
    from stages.commands.exporting import subject
    from stages.evaluate import work

    def loaded(*_args, **_more):
        raise AssertionError("the model was loaded")

    for name in ("load_model", "folder", "read_manifest"):
        monkeypatch.setattr(models, name, loaded)
    monkeypatch.setattr(chat.models, "read_manifest", lambda: None)
    monkeypatch.setattr(work, "_examples", lambda _split: None)
    monkeypatch.setattr(work, "leaks", lambda _split: None)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
    (folder / "adapters.safetensors").write_bytes(WHOLE[:-1])
    machine = SimpleNamespace(line=lambda: "cpu")
    run = SimpleNamespace(evaluate=SimpleNamespace(split="valid"), model=None)
    options = SimpleNamespace(base=False, adapters=folder)
    with pytest.raises(UserError, match="adapter folder"):
        if user == "export":
            subject.open_subject(run, folder)
        elif user == "evaluate":
            work.evaluate(run, machine)
        else:
            chat._load(run, options)
