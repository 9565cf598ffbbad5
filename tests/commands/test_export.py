"""`python -m stages export`: what is written is base + adapter, or nothing is written."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from export_workspace import CARD, TINY, logits, loss, make, quantized, rows
from safetensors.numpy import load_file

from stages.commands import export
from stages.core.config import schema


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """No waiting for the disk."""
    monkeypatch.setattr("stages.core.files.sync", lambda path: None)
    monkeypatch.chdir(tmp_path)


def left(folder):
    """What lies in a folder besides what the workspace put there, temporary names included."""
    known = {"data", "reports", "adapters", "params.yaml", ".cache", "packed"}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def numbers(text):
    """Error, cosine and the three losses of an export's line."""
    found = re.search(
        r"error ([\d.]+)%, cosine (-?[\d.]+);"
        r" loss ([\d.]+) \(with adapter ([\d.]+), base ([\d.]+)\)",
        text,
    )
    return [float(value) for value in found.groups()]


def test_the_adapter_goes_with_its_card(tmp_path, capfd):
    base = make(tmp_path)
    assert export.main(["--adapter", "out/mine"]) == 0
    assert (tmp_path / "out/mine/README.md").read_text() == CARD
    for name in ("adapters.safetensors", "adapter_config.json"):
        copied, original = tmp_path / "out/mine" / name, tmp_path / "adapters" / name
        assert copied.read_bytes() == original.read_bytes()
    error, cosine, exported, tuned, alone = numbers(capfd.readouterr().err)
    assert (error, cosine) == (0, 1)
    assert exported == tuned == pytest.approx(loss(logits(base, "adapters")), abs=2e-5)
    assert alone == pytest.approx(loss(logits(base)), abs=2e-5)


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"fine_tune_type": "dora"},
        {"fine_tune_type": "full"},
        {"lora_parameters": schema.LoraParameters(keys=["self_attn.q_proj", "model.embed_tokens"])},
    ],
    ids=["lora", "dora", "full", "embedding"],
)
def test_the_fused_model_is_base_and_adapter_to_mlx_lm(tmp_path, train):
    base = make(tmp_path, **train)
    assert export.main(["--fused", "fused"]) == 0
    with_adapter, alone, fused = logits(base, "adapters"), logits(base), logits("fused")
    change = np.linalg.norm(with_adapter - alone)
    assert change > 0.01 * np.linalg.norm(alone)
    assert np.linalg.norm(fused - with_adapter) < 1e-4 * change
    card = (tmp_path / "fused/README.md").read_text()
    assert "mlx_lm.generate --model . --prompt" in card
    assert "With the adapter." not in card
    assert "How it was trained." in card
    names = {path.name for path in (tmp_path / "fused").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a1_fusing_into_four_bits_is_refused_where_the_change_is_lost(tmp_path, capfd):
    """A small update vanishes between the levels of 4 bits; unpacked it is kept."""
    base = make(tmp_path, quantized(tmp_path / "packed"), size=2e-3)
    assert export.main(["--fused", "four", "--bits", "4"]) == 2
    error, cosine, exported, tuned, alone = numbers(capfd.readouterr().err)
    assert left(tmp_path) == []
    assert error > 50
    assert tuned == pytest.approx(loss(logits(base, "adapters")), abs=2e-5)
    assert alone == pytest.approx(loss(logits(base)), abs=2e-5)

    assert export.main(["--fused", "whole"]) == 0
    config = json.loads((tmp_path / "whole/config.json").read_text())
    assert not [key for key in config if key.startswith("quantization")]
    with_adapter, alone_z, fused = logits(base, "adapters"), logits(base), logits("whole")
    change = np.linalg.norm(with_adapter - alone_z)
    assert np.linalg.norm(fused - with_adapter) < 0.02 * change

    assert export.main(["--fused", "four", "--bits", "4", "--max-drift", "9"]) == 0
    config = json.loads((tmp_path / "four/config.json").read_text())
    assert config["quantization"]["bits"] == 4
    got, wanted = logits("four") - alone_z, with_adapter - alone_z
    assert np.linalg.norm(got - wanted) / change == pytest.approx(error / 100, rel=1e-3)
    by_hand = (got * wanted).sum() / np.linalg.norm(got) / np.linalg.norm(wanted)
    assert by_hand == pytest.approx(cosine, abs=1e-3)
    assert loss(logits("four")) == pytest.approx(exported, abs=2e-5)


def test_other_bits_than_the_bases_are_quantized_anew(tmp_path):
    base = make(tmp_path, quantized(tmp_path / "packed"), size=0.1)
    assert export.main(["--fused", "eight", "--bits", "8"]) == 0
    config = json.loads((tmp_path / "eight/config.json").read_text())
    assert config["quantization"]["bits"] == 8
    with_adapter, alone = logits(base, "adapters"), logits(base)
    assert np.linalg.norm(logits("eight") - with_adapter) < 0.1 * np.linalg.norm(
        with_adapter - alone
    )


def test_a_change_below_the_steps_of_bfloat16_needs_float32(tmp_path, capfd):
    """bfloat16 has 8 bits: a weight of 1 does not move by 1/512."""
    model = schema.Model(repo="builtin:tiny", dtype="bfloat16")
    base = make(tmp_path, model, size=4e-4)
    assert export.main(["--fused", "fused"]) == 2
    said = capfd.readouterr().err
    assert "--dtype float32" in said
    assert left(tmp_path) == []
    assert export.main(["--fused", "fused", "--dtype", "float32"]) == 0
    weights = load_file(tmp_path / "fused/model.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype("float32")}
    assert json.loads((tmp_path / "fused/config.json").read_text())["torch_dtype"] == "float32"
    assert base.exists()


def test_the_template_of_training_goes_into_the_fused_model(tmp_path):
    from transformers import AutoTokenizer

    make(tmp_path)
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    (tmp_path / "data/mine.jinja").write_text(template)
    params = json.loads((tmp_path / "params.yaml").read_text())
    params["tokenize"] = {"chat_template": "data/mine.jinja"}
    (tmp_path / "params.yaml").write_text(json.dumps(params))
    assert export.main(["--fused", "fused"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "fused")
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<hi>"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_files_say_the_same_by_pefts_formula(tmp_path, kind):
    """In NumPy: (lora_alpha / r) · B A is the transposed scale · A B of mlx-lm."""
    lora = schema.LoraParameters(rank=4, scale=7.0, keys=["self_attn.q_proj", "mlp.down_proj"])
    make(tmp_path, fine_tune_type=kind, lora_parameters=lora)
    assert export.main(["--peft", "peft"]) == 0
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 28)
    assert settings["use_dora"] == (kind == "dora")
    modules = [f"model.layers.{i}.{key}" for i in (2, 3) for key in sorted(lora.keys)]
    assert sorted(settings["target_modules"]) == sorted(modules)
    theirs = load_file(tmp_path / "peft/adapter_model.safetensors")
    ours = load_file(tmp_path / "adapters/adapters.safetensors")
    for name in modules:
        prefix = f"base_model.model.{name}"
        a, b = theirs[f"{prefix}.lora_A.weight"], theirs[f"{prefix}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] == 4
        wanted = 7.0 * ours[f"{name}.lora_a"] @ ours[f"{name}.lora_b"]
        np.testing.assert_allclose(28 / 4 * (b @ a), wanted.T, rtol=1e-4, atol=1e-6)
        if kind == "dora":
            magnitude = theirs[f"{prefix}.lora_magnitude_vector"]
            np.testing.assert_array_equal(magnitude, ours[f"{name}.m"])
    card = (tmp_path / "peft/README.md").read_text()
    assert "library_name: peft" in card
    assert "PeftModel.from_pretrained" in card


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_peft_library_computes_the_same_logits(tmp_path, kind, capfd):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    from transformers import AutoModelForCausalLM

    base = make(tmp_path, fine_tune_type=kind)
    assert export.main(["--peft", "peft"]) == 0
    assert "adapter as PEFT loads it" in capfd.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, "peft").eval()
    with torch.no_grad():
        found = [model(torch.tensor(row[None]).long()).logits[0, 2:-1] for row in rows()]
    found, wanted = torch.cat(found).numpy(), logits(base, "adapters")
    change = np.linalg.norm(wanted - logits(base))
    assert np.linalg.norm(found - wanted) < 1e-3 * change


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"fine_tune_type": "full"}, "whole layers"),
        (
            {"lora_parameters": schema.LoraParameters(keys=["model.embed_tokens"])},
            "LoRAEmbedding",
        ),
    ],
)
def test_what_peft_has_no_form_for_is_refused(tmp_path, capfd, train, said):
    make(tmp_path, **train)
    assert export.main(["--peft", "peft"]) == 2
    assert said in capfd.readouterr().err
    assert left(tmp_path) == []


def test_a_folder_that_exists_is_never_touched(tmp_path, capfd):
    make(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/note.txt").write_text("kept")
    for words in (["--adapter", "mine"], ["--peft", "mine"], ["--fused", "params.yaml"]):
        assert export.main(words) == 2
        assert "it exists" in capfd.readouterr().err
    assert export.main(["--adapter", "new", "--peft", "./new"]) == 2
    assert "twice" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note.txt"]
    assert left(tmp_path) == ["mine"]


def test_no_export_below_a_file(tmp_path, capfd):
    make(tmp_path)
    assert export.main(["--adapter", "reports/card.md/mine"]) == 2
    assert "card.md is a file" in capfd.readouterr().err
    assert (tmp_path / "reports/card.md").read_text() == CARD


def test_nothing_asked_for_and_needless_flags(tmp_path, capfd):
    make(tmp_path)
    assert export.main([]) == 2
    assert "--adapter FOLDER" in capfd.readouterr().err
    assert export.main(["--adapter", "a", "--bits", "4"]) == 2
    assert "fused" in capfd.readouterr().err
    assert left(tmp_path) == []


def test_without_a_card_or_an_adapter_it_says_what_to_run(tmp_path, capfd):
    make(tmp_path)
    (tmp_path / "reports/card.md").rename(tmp_path / "reports/other.md")
    assert export.main(["--adapter", "out"]) == 2
    assert "dvc repro" in capfd.readouterr().err
    (tmp_path / "reports/other.md").rename(tmp_path / "reports/card.md")
    (tmp_path / "adapters/adapters.safetensors").unlink()
    assert export.main(["--adapter", "out"]) == 2
    assert "adapters.safetensors" in capfd.readouterr().err
    assert left(tmp_path) == []


def test_an_adapter_of_another_base_is_refused(tmp_path, capfd):
    make(tmp_path)
    file = tmp_path / "adapters/adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model": "org/other", "model_revision": "a" * 40}))
    assert export.main(["--adapter", "out"]) == 2
    said = capfd.readouterr().err
    assert "org/other at aaaa" in said
    assert "builtin:tiny" in said


def test_an_adapter_of_mlx_lm_itself_is_exported(tmp_path):
    """Its config names a path and no revision."""
    base = make(tmp_path)
    file = tmp_path / "adapters/adapter_config.json"
    config = json.loads(file.read_text())
    for key in ("model_revision", "model_dtype", "model_type"):
        del config[key]
    file.write_text(json.dumps({**config, "model": "/some/where", "iters": 3}))
    (tmp_path / "adapters").rename(tmp_path / "theirs")
    assert export.main(["--fused", "fused", "--adapters", "theirs"]) == 0
    wanted = logits(base, "theirs")
    assert np.linalg.norm(logits("fused") - wanted) < 1e-4 * np.linalg.norm(wanted - logits(base))


def test_an_adapter_that_adds_nothing_is_equal_to_its_base(tmp_path, capfd):
    make(tmp_path, size=0.0)
    assert export.main(["--fused", "fused"]) == 0
    error, _, exported, tuned, alone = numbers(capfd.readouterr().err)
    assert error == 0
    assert exported == tuned == alone


def test_long_rows_are_cut_and_valid_serves_where_test_is_empty(tmp_path, monkeypatch):
    from export_workspace import write_examples

    from stages.commands.exporting import rows as chosen

    draw = np.random.default_rng(2)
    for split, lengths in (("train", [5]), ("valid", [2000] * 3 + [40] * 20), ("test", [])):
        write_examples(tmp_path / f"data/examples/{split}.parquet", lengths, draw)
    split, found = chosen.choose()
    assert split == "valid"
    assert len(found) == chosen.MOST_ROWS
    assert {len(row.tokens) for row in found} == {40, 3 + chosen.TOKENS_AFTER_PROMPT}
    assert all(row.targets[0] == 3 and row.targets[-1] == len(row.tokens) - 1 for row in found)
    monkeypatch.setattr(chosen, "LONG", 50)
    assert {len(row.tokens) for row in chosen.choose()[1]} == {40}
    monkeypatch.setattr(chosen, "LONG", 30)
    assert len(chosen.choose()[1]) == chosen.MOST_ROWS


def test_drift_by_hand():
    from stages.commands.exporting.drift import measure
    from stages.commands.exporting.rows import Seen

    base = Seen(np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([2.0, 2.0]))
    tuned = Seen(np.array([[1.0, 3.0], [0.0, 4.0]]), np.array([0.0, 3.0]))
    half = Seen(np.array([[1.0, 3.0], [0.0, 0.0]]), np.array([1.0, 3.0]))
    found = measure(base, tuned, half)
    assert found.error == pytest.approx(4 / 5)
    assert found.cosine == pytest.approx(9 / (5 * 3))
    assert (found.base, found.tuned, found.exported, found.moved) == (2, 1.5, 2, 1.5)
    assert found.loss_limit(0.1) == pytest.approx(0.15)
    assert not found.within(0.32)
    assert not found.within(0.79)
    assert found.within(0.81)
    assert found.needed() == pytest.approx(0.8)
    alone = Seen(base.logits + 9, base.losses)
    assert measure(base, tuned, Seen(half.logits + 9, half.losses), alone) == found
    worse = measure(base, tuned, Seen(tuned.logits, tuned.losses + 3))
    assert worse.error == 0
    assert not worse.within(1.9)
    assert worse.needed() == pytest.approx(2)
    assert not measure(base, tuned, Seen(half.logits * np.nan, half.losses)).within(1e9)


def test_dropout_is_off_in_the_check(tmp_path):
    """With dropout on, the adapter would differ from itself."""
    lora = schema.LoraParameters(dropout=0.5)
    make(tmp_path, TINY, lora_parameters=lora)
    mx.random.seed(0)
    assert export.main(["--adapter", "a", "--fused", "f", "--peft", "p"]) == 0
