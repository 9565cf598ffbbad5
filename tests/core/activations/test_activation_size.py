"""Sizes by hand, and when a plan without measurements turns the cache on."""

from types import SimpleNamespace

import numpy as np
import pytest

from stages.core import files
from stages.core.activations import size
from stages.core.config.schema import Settings

MANIFEST = SimpleNamespace(num_layers=30, hidden_size=576, dtype="float32")
LENGTHS = np.array([100, 300, 600])


def settings(num_layers=8, updates=None, epochs=None, stop_at_update=None, **memory):
    made = Settings()
    made.train.num_layers, made.train.effective_batch_size = num_layers, 2
    made.train.updates, made.train.epochs = updates, epochs
    made.train.stop_at_update = stop_at_update
    for key, value in memory.items():
        setattr(made.memory, key, value)
    return made


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """An empty workspace on a disk of which the test says how much is free, in GB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    free = {"gb": 100.0}
    monkeypatch.setattr(files, "free_gb", lambda _path: free["gb"])
    return free


def test_predicted_size_is_tokens_times_hidden_size_times_bytes():
    assert size.predicted_gb(MANIFEST, LENGTHS) == pytest.approx(1000 * 576 * 4 / 1e9)
    half = SimpleNamespace(hidden_size=2560, dtype="bfloat16")
    assert size.predicted_gb(half, np.array([7]), streams=4) == pytest.approx(
        7 * 2560 * 2 * 4 / 1e9
    )


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ({"epochs": 1.0}, True),
        ({"updates": 2}, True),  # 2 updates of 2 examples see all 3
        ({"updates": 1}, False),
        ({"epochs": 3.0, "stop_at_update": 1}, False),
        ({"epochs": 0.5}, False),  # 1 update: 2 of 3 examples
        ({"epochs": 1.0, "num_layers": -1}, False),
        ({"epochs": 1.0, "num_layers": 30}, False),
        ({"epochs": 1.0, "num_layers": 29}, True),
        ({"updates": 1, "activation_cache": "on"}, True),
        ({"epochs": 9.0, "activation_cache": "off"}, False),
    ],
)
def test_auto_wants_frozen_layers_and_a_whole_pass(disk, given, on):
    assert size.wanted(settings(**given), MANIFEST, LENGTHS) is on


def test_auto_is_off_where_the_disk_or_the_limit_is_too_small(disk):
    lengths = np.array([1_000_000] * 4)  # 4e6 tokens x 2304 bytes = 9.2 GB
    run = settings(epochs=1.0)
    assert size.wanted(run, MANIFEST, lengths)
    disk["gb"] = 10.0  # 9.2 + 1 in reserve do not fit
    assert not size.wanted(settings(epochs=1.0, activation_cache_limit_gb=50), MANIFEST, lengths)
    disk["gb"] = 12.0
    assert size.wanted(settings(epochs=1.0, activation_cache_limit_gb=50), MANIFEST, lengths)
    assert not size.wanted(run, MANIFEST, lengths)  # half of 12 is the limit
    assert not size.wanted(settings(epochs=1.0, activation_cache_limit_gb=9), MANIFEST, lengths)


def test_the_limit_is_half_of_what_is_free_or_taken_by_activations(disk, tmp_path):
    assert size.limit_gb("auto") == 50.0
    assert size.limit_gb(3) == 3.0
    folder = tmp_path / ".cache/activations/abc"
    folder.mkdir(parents=True)
    with open(folder / "00000.bin", "wb") as file:
        file.truncate(20_000_000_000)  # sparse
    assert size.used_gb() == pytest.approx(20.0)
    assert size.limit_gb("auto") == pytest.approx(60.0)
