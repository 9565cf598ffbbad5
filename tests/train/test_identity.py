"""Equal mathematics, equal name; machine and running settings do not count."""

import json

import pytest
from train_workspace import TRAIN, make, settings

from stages.core import files
from stages.core.config.settings import load_settings
from stages.core.errors import UserError
from stages.train.identity import checkpoints, run_fingerprint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return make(tmp_path, [9, 12, 8, 10], valid=[7])


def name(folder, train=(), **groups):
    settings(folder, train, **groups)
    return run_fingerprint(load_settings())


def test_memory_running_and_an_early_end_do_not_count(folder):
    first = name(folder)
    assert len(first) == 16
    assert name(folder, memory={"batch_size": 2, "grad_checkpoint": True}) == first
    assert name(folder, run={"updates_per_save": 1, "device": "cpu"}) == first
    assert name(folder, {"stop_at_update": 3}) == first
    assert checkpoints(first).relative_to(folder).as_posix() == f".cache/checkpoints/{first}"


@pytest.mark.parametrize(
    "train",
    [
        {"seed": 4},
        {"updates": 9},
        {"learning_rate": 2e-3},
        {"optimizer": "adam"},
        {"lora_parameters": {"rank": 3}},
        {"schedule": {"name": "cosine"}},
        {"clip_norm": 1.0},
        {"patience": 2},
    ],
)
def test_every_train_setting_counts(folder, train):
    assert name(folder, train) != name(folder)


def test_examples_model_and_versions_count(folder, monkeypatch):
    first = name(folder)
    manifest = json.loads((folder / "data/model.json").read_text())
    files.write_json(folder / "data/model.json", {**manifest, "dtype": "bfloat16"})
    second = name(folder)
    make(folder, [9, 12, 8, 11], valid=[7])
    third = name(folder)
    make(folder, [9, 12, 8, 10], valid=[8])
    fourth = name(folder)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "9.9")
    fifth = name(folder)
    assert len({first, second, third, fourth, fifth}) == 5


def test_adapters_to_start_from_count_by_content(folder):
    for place, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (folder / place).mkdir()
        (folder / place / "adapters.safetensors").write_bytes(content)
    names = [name(folder, {"initial_adapters": place}) for place in "abc"]
    assert names[0] == names[1] != names[2]
    assert name(folder) not in names


def test_missing_files_are_named(folder):
    (folder / "data/examples/valid.parquet").unlink()
    with pytest.raises(UserError, match=r"valid\.parquet"):
        name(folder, TRAIN)
