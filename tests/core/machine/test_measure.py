"""Peaks are those of the block alone; numbers are GB of 1e9 bytes."""

import mlx.core as mx
import pytest

from stages.core.machine.measure import footprint_gb, memory_now, phase


def test_a_phase_keeps_its_own_largest_peak():
    peaks = {}
    with phase(peaks, "large"):
        mx.eval(mx.zeros((5_000_000,)))
    with phase(peaks, "small"):
        mx.eval(mx.zeros((1000,)))
    with phase(peaks, "large"):
        mx.eval(mx.zeros((1000,)))
    assert peaks["large"] - peaks["small"] == pytest.approx(0.02, rel=0.05)


def test_memory_now_counts_living_arrays():
    before = memory_now()
    held = mx.zeros((5_000_000,))
    mx.eval(held)
    after = memory_now()
    assert after["active_gb"] - before["active_gb"] == pytest.approx(0.02, rel=0.05)
    assert set(after) == {"active_gb", "cache_gb", "footprint_gb"}


def test_the_footprint_is_that_of_a_process():
    assert 0.02 < footprint_gb() < 50
