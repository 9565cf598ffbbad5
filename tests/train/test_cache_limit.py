"""`memory.cache_limit_gb` on the stage itself: the allocator keeps no more, and it is recorded."""

import csv
import json

import pytest
from processes import once
from train_workspace import make

LENGTHS = [120, 300, 80, 210, 150, 290, 60, 240]


def run(folder, *words):
    """(largest and last `cache_gb` of all updates, effective limits, losses)."""
    status, said = once(folder, *words)
    assert status == 0, said
    with open(folder / "reports/train/run.csv") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["active_gb"]) < float(row["peak_gb"]) for row in rows)
    with open(folder / "reports/train/history.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    record = json.loads((folder / "reports/train/run.json").read_text())
    return max(float(row["cache_gb"]) for row in rows), record["limits"], losses


def test_the_cache_stays_below_its_limit_and_the_losses_stay(tmp_path):
    folder = make(tmp_path / "run", LENGTHS, train={"updates": 4, "learning_rate": 1e-4})
    free, limits, losses = run(folder, "memory.activation_cache=off")
    assert limits["cache_limit_gb"] is None
    assert free > 0.01
    for limit in (0.002, 0):
        kept, limits, same = run(
            folder, "memory.activation_cache=off", f"memory.cache_limit_gb={limit}"
        )
        assert limits["cache_limit_gb"] == limit
        assert kept <= limit
        assert same == pytest.approx(losses, rel=1e-6)
