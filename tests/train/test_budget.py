"""`memory.budget_gb` on the stage itself: another plan, the same losses, or a refusal."""

import csv
import json

import pytest
from processes import once
from train_workspace import make

LENGTHS = [20, 30, 15, 50, 44, 9, 33, 27]


def losses(folder):
    with open(folder / "reports/train/history.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_a_set_budget_is_planned_for_and_the_losses_stay(tmp_path):
    folder = make(tmp_path / "run", LENGTHS, train={"updates": 3, "learning_rate": 1e-4})
    status, said = once(folder)
    assert status == 0, said
    unplanned = losses(folder)
    status, said = once(folder, "memory.budget_gb=1")
    assert status == 0, said
    assert "budget 1.00 GB (memory.budget_gb=1)" in said
    plan = json.loads((folder / "reports/train/run.json").read_text())["plan"]
    # design: within 5% or 20 MB; a run of the tiny model takes some 5 MB
    assert plan["predicted_peak_gb"] == pytest.approx(plan["measured_peak_gb"], abs=0.02)
    assert losses(folder) == pytest.approx(unplanned, rel=1e-5)
    status, said = once(folder, "memory.budget_gb=0.0005")
    assert status == 2, said
    assert "No plan fits the memory budget" in said
    assert "Traceback" not in said
