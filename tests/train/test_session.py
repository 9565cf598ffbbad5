"""What a session takes from a checkpoint, and what it tells the allocator."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from jobs import PLAN, random_examples
from processes import once
from train_workspace import make, settings

from stages.core.machine.device import Device
from stages.train import session

CPU = Device(kind="cpu", name="x", blas="x", threads=1, gflops=0.0, versions={})


def test_other_threads_and_other_memory_settings_are_said(tmp_path, monkeypatch):
    folder = make(
        tmp_path / "work", [20, 30, 15, 50, 44, 9], train={"updates": 6, "stop_at_update": 2}
    )
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    status, said = once(folder)
    assert status == 0, said
    settings(folder, {"updates": 6}, memory={"batch_size": 1})
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    status, said = once(folder)
    assert status == 0, said
    assert "OpenBLAS has 2 threads, 1 when the run was stopped" in said
    assert "memory settings changed since the checkpoint: a new plan is used" in said
    rows = (folder / "reports/train/history.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize(("asked", "expected"), [("auto", 9e9), (5, 5e9), (20, 9e9)])
def test_metal_keeps_wired_what_is_asked_or_recommended(monkeypatch, asked, expected):
    told = {}
    info = {"max_recommended_working_set_size": int(9e9)}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", lambda value: told.update(wired=value))
    monkeypatch.setattr(mx, "set_cache_limit", lambda value: told.update(cache=value))
    plan = replace(PLAN, cache_limit_gb=0.5)
    limits = session.set_limits(plan, asked, replace(CPU, kind="metal"))
    assert told == {"wired": expected, "cache": 5e8}
    assert limits == {"cache_limit_gb": 0.5, "wired_limit_gb": expected / 1e9}


def test_elsewhere_nothing_is_wired(monkeypatch):
    monkeypatch.setattr(mx, "set_wired_limit", lambda value: pytest.fail("wired"))
    limits = session.set_limits(PLAN, "auto", CPU)
    assert limits == {"cache_limit_gb": None, "wired_limit_gb": None}


def test_the_plan_is_checked_on_an_example_with_targets_of_middling_length():
    examples = random_examples([30, 700, 125, 133, 40])
    examples.target_mask[examples.offsets[2] : examples.offsets[3]] = False
    micro = session.check_batch(examples, PLAN)
    assert micro.ids.tolist() == [3]
    assert micro.targets == 131
    assert np.array_equal(micro.tokens_BT[0], examples.example(3)[0])
