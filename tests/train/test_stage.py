"""The stage as it is started: outputs, going on later, warm start, a run that fails."""

import json

import mlx.core as mx
import numpy as np
import pytest
from processes import once
from train_workspace import checkpoints, make, results, settings

from stages.core.update import batching

LENGTHS = [20, 30, 15, 50, 44, 9, 33, 27, 60, 12]
TRAIN = {"updates": 9, "updates_per_eval": 4, "schedule": {"name": "linear", "end": 1e-4}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run to its end, and what it said."""
    folder = make(tmp_path_factory.mktemp("whole"), LENGTHS, valid=[20, 31], train=TRAIN)
    status, said = once(folder)
    assert status == 0, said
    return folder, said


def test_the_contracts_files_are_there(whole):
    folder, said = whole
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "adapters/adapters.safetensors",
        "adapters/adapter_config.json",
        "reports/train/history.csv",
        "reports/train/valid.csv",
        "reports/train/run.csv",
        "reports/train/run.json",
    } <= names
    assert checkpoints(folder) == []
    run = json.loads((folder / "reports/train/run.json").read_text())
    assert {"host", "device", "versions", "plan", "recoveries"} <= set(run)
    assert {"predicted_peak_gb", "measured_peak_gb"} <= set(run["plan"])
    assert run["plan"]["measured_peak_gb"] == max(run["phase_peaks_gb"].values())
    assert run["adapters"]["update"] == 9
    assert "learning rate, linear: 0.001 at update 1 (first)" in said
    assert "trains 4,480 numbers" in said
    assert "adapters/ holds update 9: the best validation loss" in said


def test_mlx_lm_reads_the_adapter(whole):
    from mlx_lm.tuner.utils import load_adapters

    from stages.core.config import schema
    from stages.core.model import models
    from stages.core.model.manifest import read_manifest

    folder, _ = whole
    model = schema.Model(repo="builtin:tiny")
    place = models.folder(read_manifest(folder / "data/model.json"), model)
    plain, _ = models.load_model(place)
    tuned, _ = models.load_model(place)
    load_adapters(tuned, str(folder / "adapters"))
    tokens = mx.array([[5, 6, 7, 8]])
    assert np.abs(np.array(tuned(tokens) - plain(tokens))).max() > 1e-3


def test_a_second_run_trains_again_and_gives_the_same(whole):
    folder, _ = whole
    expected = results(folder)
    (folder / "adapters/adapters.safetensors").unlink()
    status, said = once(folder)
    assert status == 0, said
    assert "goes on after" not in said
    assert results(folder) == expected


def test_stop_at_update_and_train_on_is_the_whole_run(whole, tmp_path):
    folder = make(tmp_path / "parts", LENGTHS, valid=[20, 31], train={**TRAIN, "stop_at_update": 5})
    status, said = once(folder)
    assert status == 0, said
    assert "9 updates, ends at 5" in said
    rows = (folder / "reports/train/valid.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["4", "5"]
    assert checkpoints(folder) == [5]
    settings(folder, TRAIN)
    status, said = once(folder)
    assert status == 0, said
    assert "goes on after update 5" in said
    assert results(folder) == results(whole[0])
    assert checkpoints(folder) == []


def test_warm_start_from_an_adapter_folder(whole, tmp_path):
    folder = make(tmp_path / "warm", LENGTHS, valid=[20, 31])
    start = {"initial_adapters": str(whole[0] / "adapters"), "learning_rate": 0.0, "updates": 1}
    settings(folder, {**TRAIN, **start})
    status, said = once(folder)
    assert status == 0, said
    assert results(folder)["adapters"] == results(whole[0])["adapters"]
    last = (whole[0] / "reports/train/valid.csv").read_text().splitlines()[-1].split(",")[2]
    now = (folder / "reports/train/valid.csv").read_text().splitlines()[-1].split(",")[2]
    assert now == last


def test_a_warm_start_that_does_not_fit_lists_the_differences(whole, tmp_path):
    folder = make(tmp_path / "warm", LENGTHS)
    start = {"initial_adapters": str(whole[0] / "adapters"), "lora_parameters": {"rank": 3}}
    settings(folder, {**TRAIN, **start})
    status, said = once(folder)
    assert status == 2
    assert "lora_a: (64, 2) in the folder, (64, 3) in the model" in said
    assert "Traceback" not in said


def test_g9_g10_a_run_that_turns_nan_stops_names_its_rows_and_saves_nothing_bad(tmp_path):
    folder = make(tmp_path / "nan", LENGTHS)
    settings(folder, {**TRAIN, "learning_rate": 1e30, "schedule": {"name": "constant"}})
    status, said = once(folder)
    assert status == 1
    assert "Traceback" not in said
    assert "is not finite: training stops" in said
    report = json.loads((folder / "reports/train/stopped.json").read_text())
    (copy,) = folder.glob(".cache/checkpoints/*/stopped.json")
    assert json.loads(copy.read_text()) == report
    # Update 1 makes the weights huge, so update 2 cannot have a finite loss.
    ids = batching.effective_batches(10, 4, seed=3, epoch=0)[1]
    assert report["update"] == 2
    assert [example["row"] for example in report["examples"]] == [10 + i for i in ids]
    assert f"update 2, row {10 + ids[0]} (example {ids[0]})" in said
    assert all(example["loss_not_finite"] for example in report["examples"])
    assert not (folder / "adapters").exists()
    for file in folder.glob(".cache/checkpoints/*/0*/adapters.safetensors"):
        assert all(mx.isfinite(x).all().item() for x in mx.load(str(file)).values())
