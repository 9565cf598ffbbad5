"""The rate of every update, by hand."""

import math

import pytest

from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.update import schedule


def train_of(rate=1.0, **values):
    return schema.Train(learning_rate=rate, schedule=schema.Schedule(**values))


def all_rates(train, updates):
    rate = schedule.rates(train, updates)
    return [rate(done) for done in range(updates)]


def test_constant():
    assert all_rates(train_of(0.25), 4) == [0.25] * 4


def test_constant_with_warm_up_starts_at_zero_as_in_mlx_lm():
    found = all_rates(train_of(1.0, warmup=4), 7)
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_last_update():
    found = all_rates(train_of(1.0, name="linear", end=0.5), 5)
    assert found == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5])


def test_linear_after_warm_up():
    # Two updates of warm-up, top at the third and fourth, then down to 0 at the seventh.
    found = all_rates(train_of(1.0, name="linear", warmup=2), 7)
    assert found == pytest.approx([0, 0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0], abs=1e-7)


def test_cosine_is_half_way_down_in_the_middle():
    found = all_rates(train_of(2e-4, name="cosine", end=2e-5), 9)
    expected = [2e-5 + 1.8e-4 * 0.5 * (1 + math.cos(math.pi * done / 8)) for done in range(9)]
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[4] == pytest.approx(1.1e-4, rel=1e-6)
    assert found[8] == pytest.approx(2e-5, rel=1e-5)


def test_g4_warm_up_counts_updates_and_not_micro_batches():
    # Warm-up 4, then decay over 16 updates: mlx-lm with accumulation 4 reached the top at the end.
    train = train_of(1.0, name="cosine", warmup=4)
    found = all_rates(train, 21)
    assert found[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert found[5] == 1.0
    assert found[5:] == sorted(found[5:], reverse=True)
    assert found[20] == pytest.approx(0.0, abs=1e-7)


def test_a_share_of_the_run_is_a_warm_up():
    assert schedule.warmup_updates(schema.Schedule(warmup=0.1), 40) == 4
    assert schedule.warmup_updates(schema.Schedule(warmup=0.0), 40) == 0
    assert schedule.warmup_updates(schema.Schedule(warmup=1.0), 40) == 1
    assert all_rates(train_of(1.0, warmup=0.25), 8)[:3] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("warmup", [10, 25])
def test_a_warm_up_as_long_as_the_run_is_refused_with_both_numbers(warmup):
    with pytest.raises(UserError) as caught:
        schedule.rates(train_of(warmup=warmup), 10)
    assert f"{warmup} updates of warm-up in a run of 10" in str(caught.value)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_run_of_one_update_has_the_full_rate(name):
    assert all_rates(train_of(0.5, name=name), 1) == [0.5]


def test_the_line_names_start_end_of_warm_up_middle_and_end():
    train = train_of(1.0, name="linear", warmup=4, end=0.1)
    assert schedule.line(train, 20) == (
        "learning rate, linear: 0 at update 1 (first), 1 at update 5 (end of warm-up),"
        " 0.679 at update 11 (middle), 0.1 at update 20 (last)"
    )
    assert schedule.line(train_of(0.5), 1) == "learning rate, constant: 0.5 at update 1 (first)"
