"""What depends on the machine is told or refused, and never stored."""

import inspect
from pathlib import Path

import mlx.optimizers as optimizers
import pytest

from stages.core import files
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.model import models, trainable
from stages.validate import machine, products
from stages.validate.run import OPTIMIZER_KEYS
from tests.validate import case
from tests.validate.test_validate import run, workspace  # noqa: F401


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("layers", [1, -1])
def test_trained_parameters_are_those_of_the_model(kind, layers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    model = schema.Model(repo="builtin:tiny")
    manifest = models.build_manifest(model)
    settings = case.settings(fine_tune_type=kind, num_layers=layers)
    loaded, _ = models.load_model(models.folder(manifest, model))
    attached = trainable.attach(loaded, settings.train)
    predicted = machine.trained_parameters(manifest, settings)
    assert attached.trained_parameters <= predicted <= 1.1 * attached.trained_parameters


def test_checkpoint_size():
    """AdamW: weights and two moments of 4 bytes, for 2 kept and 1 in the making; 3 best weights."""
    settings = case.settings(num_layers=4)
    settings.train.lora_parameters.keys = ["lm_head"]
    numbers = 8 * (260 + 32)
    assert machine.trained_parameters(case.MANIFEST, settings) == numbers + 4 * 8 * 128
    numbers += 4 * 8 * 128
    expected = (3 * 12 + 3 * 4) * numbers / 1e9
    assert machine.checkpoint_gb(case.MANIFEST, settings) == pytest.approx(expected)


def test_a_full_disk_is_refused_and_stored_nowhere(workspace, monkeypatch):  # noqa: F811
    """M7."""
    case.write(workspace)
    before = run()
    assert not [entry for entry in before["checks"] if entry["name"] == "disk"]
    monkeypatch.setattr(files, "free_gb", lambda path: 0.25)
    with pytest.raises(UserError, match="do not fit on the disk") as caught:
        run()
    assert "0.25 GB free" in caught.value.found
    assert "run.keep_last" in caught.value.fix


def test_a_slow_type_is_told_with_its_factor(workspace, monkeypatch, capsys):  # noqa: F811
    case.write(workspace, case.manifest(dtype="bfloat16"))
    monkeypatch.setattr(products, "slowdown", lambda manifest, kind: 20.4)
    report = run()
    said = capsys.readouterr().err
    assert "bfloat16 products are 20 times slower" in said
    assert "model.dtype=float32" in said
    assert not [entry for entry in report["checks"] if entry["name"] == "slow_type"]


def test_float32_is_not_measured(workspace, monkeypatch):  # noqa: F811
    case.write(workspace)
    monkeypatch.setattr(products, "slowdown", lambda manifest, kind: 1 / 0)
    assert run()["ok"]


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": {"bits": 4, "group_size": 64}}],
)
def test_the_factor_is_measured(changes):
    factor = products.slowdown(case.manifest(**changes), "cpu")
    assert factor is not None
    assert factor > 0


def test_more_workers_than_examples_in_a_batch(workspace):  # noqa: F811
    case.write(workspace)
    settings = case.settings(effective_batch_size=4)
    settings.run.launch.hosts = 3
    settings.memory.grad_accumulation_steps = 2
    with pytest.raises(UserError, match="workers times accumulation") as caught:
        run(settings)
    assert "3 workers × 2 steps" in caught.value.found


@pytest.mark.parametrize("name", OPTIMIZER_KEYS)
def test_optimizer_keys_are_those_of_mlx(name):
    made = {
        "adam": "Adam",
        "adamw": "AdamW",
        "sgd": "SGD",
        "muon": "Muon",
        "adafactor": "Adafactor",
    }
    parameters = inspect.signature(getattr(optimizers, made[name]).__init__).parameters
    assert OPTIMIZER_KEYS[name] == set(parameters) - {"self", "learning_rate"}


def test_paths_are_no_part_of_the_report(workspace):  # noqa: F811
    case.write(workspace)
    assert str(Path.cwd()) not in str(run())
