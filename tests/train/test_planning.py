"""Which plan a session takes, and when it pays to measure; times worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from jobs import random_examples

from stages.core.config.schema import Settings
from stages.core.machine.device import Device
from stages.core.memory import limits
from stages.core.memory.plan import Plan
from stages.train import planning
from stages.train.planning import Planned

PLAN = Plan(4, 256, (64,), predicted_peak_gb=2.0)
OTHER = Plan(2, 128, (64,))
MACHINE = {"threads": 2, "device": "cpu", "memory": {}}
FACTS = SimpleNamespace(
    bytes=4_000_000_000,
    parameters=1_000_000_000 + 32_000_000,
    embedding_rows=32_000,
    hidden_size=1000,
    num_layers=10,
    tied=True,
)


def job(facts=FACTS, gflops=100.0, updates=1000, **memory):
    settings = Settings()
    settings.train.updates, settings.train.effective_batch_size = updates, 8
    settings.train.num_layers = 5
    for name, value in memory.items():
        setattr(settings.memory, name, value)
    device = Device(kind="cpu", name="x", blas="x", threads=2, gflops=gflops, versions={})
    # 100 tokens each, the first 50 of them no targets
    return Planned(settings, facts, random_examples([100] * 40, prompt=50), OTHER, device)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """60 of 100 GB free are the budget; nothing was measured before."""
    monkeypatch.setattr(limits, "available", lambda: 100 * 10**9)
    state = SimpleNamespace(known=False)
    monkeypatch.setattr(planning, "Surveyor", lambda *_: state)
    return state


def test_the_time_of_a_run_by_hand():
    """1000 updates of 8 rows; a row: 1e9 × (2 + 2 × 5/10) × 100 + 32e6 × 4 × 50 operations."""
    seconds = 8000 * (1e9 * 3 * 100 + 32e6 * 4 * 50) / 100e9
    assert planning.run_seconds(job()) == pytest.approx(seconds)
    full = job()
    full.settings.train.fine_tune_type, full.settings.train.num_layers = "full", -1
    full.settings.train.stop_at_update = 10
    seconds = 80 * (1e9 * 6 * 100 + 32e6 * 4 * 50) / 100e9
    assert planning.run_seconds(full) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("given", "known", "measured", "why"),
    [
        ({}, False, True, "against a run of about 6.8 h"),
        ({"gflops": 1e4}, False, False, "about 30 s against a run of about 4 min"),
        ({"gflops": 1e4}, True, True, "about 3 s against a run of about 4 min"),
        ({"gflops": 1e5}, True, False, "about 3 s against a run of about 25 s"),
        ({"gflops": 1e5, "budget_gb": 8}, False, True, "memory.budget_gb is set"),
        (
            {"gflops": 1e5, "facts": SimpleNamespace(**{**vars(FACTS), "bytes": 20 * 10**9})},
            False,
            True,
            "the weights take 20.0 of 60.0 GB",
        ),
        (
            {"facts": SimpleNamespace(**{**vars(FACTS), "bytes": 10**6})},
            True,
            False,
            "the model is small",
        ),
    ],
    ids=["long", "short", "known", "very-short", "budget", "tight", "small"],
)
def test_when_it_pays_to_measure(machine, given, known, measured, why):
    machine.known = known
    found = planning.decision(job(**given))
    assert found[0] == measured
    assert why in found[1]


def plan(monkeypatch, saved=None, recovered=None, machine=MACHINE, **given):
    monkeypatch.setattr(planning, "new", lambda _: OTHER)
    return planning.plan(job(**given), machine, saved, recovered)


def saved(plan=PLAN, **machine):
    return SimpleNamespace(plan=plan, machine={**MACHINE, **machine})


def test_a_recoverys_plan_wins_over_the_checkpoints_and_over_a_new_one(monkeypatch):
    smaller = replace(PLAN, batch_size=1)
    assert plan(monkeypatch) == OTHER
    assert plan(monkeypatch, saved()) == PLAN
    assert plan(monkeypatch, saved(), smaller) == smaller
    assert plan(monkeypatch, None, smaller) == smaller


def test_a_checkpoints_plan_is_kept_while_it_fits(monkeypatch, capfd):
    assert plan(monkeypatch, saved(), budget_gb=2.1) == PLAN
    assert plan(monkeypatch, saved(), budget_gb=1.9) == OTHER
    said = " ".join(capfd.readouterr().err.split())
    assert "the checkpoint's plan needs 2.00 GB, budget 1.90 GB" in said
    assert plan(monkeypatch, saved(replace(PLAN, predicted_peak_gb=None)), budget_gb=1.9) != OTHER
    assert plan(monkeypatch, saved(device="metal")) == OTHER
    assert plan(monkeypatch, saved(memory={"batch_size": 1})) == OTHER
    assert plan(monkeypatch, saved(threads=1)) == PLAN
    assert "OpenBLAS has 2 threads, 1 when" in " ".join(capfd.readouterr().err.split())
