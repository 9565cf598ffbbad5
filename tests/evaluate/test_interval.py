import numpy as np
import pytest

from stages.evaluate.interval import bootstrap, resamples_of


def test_one_row_gives_its_own_change_three_times():
    found = bootstrap(np.array([6.0]), np.array([4.0]), np.array([4]))
    assert (found.change, found.low, found.high) == (-0.5, -0.5, -0.5)


def test_two_rows_by_hand():
    """Of the 4 equal resamples (aa, ab, ba, bb) each end has a quarter: the ends are the limits.

    Row a: 10 targets, change +10, so +1 a target. Row b: 30 targets, change -60, so -2.
    The mean over targets: (10 - 60) / 40 = -1.25, not the mean of +1 and -2.
    """
    found = bootstrap(np.array([0.0, 100.0]), np.array([10.0, 40.0]), np.array([10, 30]))
    assert found.change == -1.25
    assert (found.low, found.high) == (-2.0, 1.0)


def test_large_sample_agrees_with_the_normal_approximation():
    """Equal targets: the mean's standard error is s / sqrt(n), the interval ±1.96 of it."""
    rng = np.random.default_rng(5)
    changes = rng.normal(-0.3, 0.8, 2000)
    base = rng.uniform(1, 5, 2000)
    found = bootstrap(base * 7, (base + changes) * 7, np.full(2000, 7))
    half = 1.959964 * changes.std() / np.sqrt(2000)
    assert found.change == pytest.approx(changes.mean(), abs=1e-12)
    assert found.low == pytest.approx(changes.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(changes.mean() + half, abs=0.05 * half)


def test_weighted_rows_agree_with_another_way_to_resample():
    """Multinomial counts per row instead of drawn indices, another generator, one by one."""
    rng = np.random.default_rng(11)
    targets = rng.integers(1, 400, 60)
    base = targets * rng.gamma(4.0, 0.6, 60)
    tuned = base - targets * rng.normal(0.2, 0.3, 60)
    found = bootstrap(base, tuned, targets)
    other = np.random.Generator(np.random.MT19937(3))
    ratios = []
    for _ in range(20_000):
        counts = other.multinomial(60, np.full(60, 1 / 60))
        ratios.append(np.dot(counts, tuned - base) / np.dot(counts, targets))
    low, high = np.percentile(ratios, [2.5, 97.5])
    width = high - low
    assert found.low == pytest.approx(low, abs=0.03 * width)
    assert found.high == pytest.approx(high, abs=0.03 * width)
    assert found.low < found.change < found.high


def test_pairing_removes_what_makes_a_row_hard_for_both():
    """Every row gains exactly 0.1 a target, however hard it is: the interval is that point."""
    base = np.array([1.0, 50.0, 300.0, 7.0])
    targets = np.array([1, 10, 20, 5])
    found = bootstrap(base, base - 0.1 * targets, targets)
    assert (found.low, found.high) == (pytest.approx(-0.1), pytest.approx(-0.1))


def test_same_input_same_interval_other_seed_another():
    rng = np.random.default_rng(0)
    base, tuned, targets = rng.random(50), rng.random(50), rng.integers(1, 9, 50)
    assert bootstrap(base, tuned, targets) == bootstrap(base, tuned, targets)
    assert bootstrap(base, tuned, targets, seed=1).low != bootstrap(base, tuned, targets).low


def test_fewer_resamples_for_a_million_rows():
    assert [resamples_of(n) for n in (1, 100_000, 500_000, 1_000_000)] == [
        10_000,
        10_000,
        2_000,
        1_000,
    ]


def test_no_rows_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        bootstrap(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
