"""Order, cut and padding: every example once an epoch, every target once, little padding."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching


def examples_of(lengths, targets_from=1):
    """Examples with tokens 1, 2, 3, …; everything from `targets_from` on is a target."""
    lengths = np.asarray(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    place = np.concatenate([np.arange(n) for n in lengths])
    return Examples(
        offsets=offsets,
        tokens=(place + 1).astype(np.int32),
        target_mask=place >= targets_from,
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def plan_of(rows, tokens, *widths, **changes):
    return Plan(batch_size=rows, batch_tokens=tokens, widths=widths, **changes)


def test_the_order_is_a_permutation_that_seed_and_epoch_decide():
    first = batching.order(50, seed=3, epoch=0)
    assert sorted(first) == list(range(50))
    assert (batching.order(50, seed=3, epoch=0) == first).all()
    assert (batching.order(50, seed=3, epoch=1) != first).any()
    assert (batching.order(50, seed=4, epoch=0) != first).any()


def test_the_order_is_that_of_raw_pcg64_numbers():
    # By hand, from NumPy's documented seeding: SeedSequence([7, 2]) -> PCG64 -> 64-bit numbers.
    raw = [int(x) for x in np.random.PCG64(np.random.SeedSequence([7, 2])).random_raw(6)]
    assert list(batching.order(6, seed=7, epoch=2)) == sorted(range(6), key=lambda i: raw[i])


def test_all_ten_rows_are_trained_each_epoch_with_batch_four():
    # G5: mlx-lm drops the remainder and sees 8 of the 10 rows for ever.
    for epoch in range(3):
        batches = batching.effective_batches(10, 4, seed=0, epoch=epoch)
        assert [len(ids) for ids in batches] == [4, 4, 2]
        assert sorted(np.concatenate(batches)) == list(range(10))


@pytest.mark.parametrize(
    ("n", "batch", "epochs", "updates", "expected"),
    [
        (10, 4, 1.0, None, 3),
        (10, 4, 2.0, None, 6),
        (10, 4, 1.5, None, 5),
        (10, 4, 0.1, None, 1),
        (10, 4, 0.7, None, 3),
        (300, 3, 0.07, None, 7),  # 0.07 * 100 is 7.000000000000001 in floating point
        (10, 4, None, 17, 17),
    ],
)
def test_updates_in_a_run(n, batch, epochs, updates, expected):
    assert batching.updates_in_run(n, batch, epochs, updates) == expected


def padded(lengths, widths):
    return sum(min(w for w in widths if w >= n) for n in lengths)


def test_widths_pad_least_among_all_choices():
    lengths = np.array([16, 17, 40, 41, 90, 100, 130, 200, 208])
    choices = sorted({-(-n // 16) * 16 for n in lengths})
    found = batching.widths(lengths, cap=208, most=3)
    by_trial = min(
        padded(lengths, (*others, choices[-1]))
        for count in range(3)
        for others in itertools.combinations(choices[:-1], count)
    )
    assert len(found) == 3
    assert padded(lengths, found) == by_trial


@given(st.lists(st.integers(2, 700), min_size=1, max_size=60), st.integers(2, 700))
@settings(max_examples=60, deadline=None)
def test_widths_are_few_ascending_and_take_every_example(lengths, cap):
    lengths = np.array(lengths)
    found = batching.widths(lengths, cap)
    assert 1 <= len(found) <= 8
    assert list(found) == sorted(set(found))
    assert found[-1] >= lengths.max()
    assert found[-1] <= max(cap, lengths.max())


def test_equal_lengths_make_equal_micro_batches():
    parts = batching.groups(np.full(16, 32), np.arange(16), plan_of(4, 128, 32))
    assert [len(part) for part in parts] == [4, 4, 4, 4]


def test_groups_are_of_like_lengths_within_the_padded_tokens():
    lengths = np.array([500, 20, 510, 30, 25, 505])
    parts = batching.groups(lengths, np.arange(6), plan_of(6, 1100, 32, 512))
    # 3 short rows together; of the long ones two fit 1100 padded tokens at width 512.
    assert parts[0].tolist() == [1, 4, 3]
    assert sorted(len(part) for part in parts[1:]) == [1, 2]


def test_a_single_longer_example_makes_a_micro_batch_of_its_own():
    parts = batching.groups(np.array([40, 300]), np.array([1, 0]), plan_of(8, 100, 48, 304))
    assert [list(part) for part in parts] == [[0], [1]]


def cost_by_trial(lengths, plan):
    """The least cost over all ways to cut the sorted rows."""
    lengths = sorted(lengths)
    best = float("inf")
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        sizes, last = [], 0
        for i, cut in enumerate([*cuts, True]):
            if cut:
                sizes.append((i + 1 - last, batching.width_for(lengths[i], plan)))
                last = i + 1
        if all(n == 1 or (n <= plan.batch_size and n * w <= plan.batch_tokens) for n, w in sizes):
            best = min(best, sum(n * w + plan.start_tokens for n, w in sizes))
    return best


@given(
    st.lists(st.integers(2, 300), min_size=1, max_size=9),
    st.integers(1, 6),
    st.sampled_from([0, 128, 1024]),
)
@settings(max_examples=60, deadline=None)
def test_no_cut_costs_less(lengths, rows, start):
    lengths = np.array(lengths)
    plan = replace(plan_of(rows, 600, 64, 128, 304), start_tokens=start)
    parts = batching.groups(lengths, np.arange(len(lengths)), plan)
    assert sorted(np.concatenate(parts)) == list(range(len(lengths)))
    widths = [batching.width_for(int(lengths[part].max()), plan) for part in parts]
    assert all(
        len(part) == 1 or (len(part) <= rows and len(part) * width <= 600)
        for part, width in zip(parts, widths, strict=True)
    )
    cost = sum(
        len(part) * width + plan.start_tokens for part, width in zip(parts, widths, strict=True)
    )
    assert cost == cost_by_trial(lengths.tolist(), plan)


def test_the_cut_does_not_hang_on_the_order_it_is_given():
    lengths = np.array([9, 5, 9, 7, 5, 9])
    plan = plan_of(2, 64, 16)
    one = batching.groups(lengths, np.array([5, 1, 0, 3]), plan)
    two = batching.groups(lengths, np.array([0, 1, 3, 5]), plan)
    assert [list(part) for part in one] == [list(part) for part in two]


def test_padding_is_no_target():
    # G6: five tokens after the first are real; mlx-lm counts the padding behind them as a sixth.
    examples = examples_of([6, 3])
    micro = batching.micro_batch(examples, np.array([0, 1]), plan_of(2, 64, 8))
    assert micro.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0], [1, 2, 3, 0, 0, 0, 0, 0]]
    assert micro.mask_BT.sum(axis=1).tolist() == [5, 2]
    assert (micro.targets, micro.tokens) == (7, 9)


def test_a_first_token_is_never_a_target():
    examples = examples_of([4], targets_from=0)
    micro = batching.micro_batch(examples, np.array([0]), plan_of(1, 8, 4))
    assert micro.mask_BT.tolist() == [[False, True, True, True]]
    assert micro.targets == examples.targets.sum() == 3


def test_a_compiled_plan_has_few_numbers_of_rows():
    examples = examples_of([5, 6, 7, 8, 7, 30, 31])
    plan = plan_of(8, 64, 8, 32, compiled=True)
    shapes = {m.tokens_BT.shape for m in batching.micro_batches(examples, np.arange(7), plan)}
    assert shapes == {(6, 8), (2, 32)}  # five rows of 8 have room for six
    five = batching.micro_batch(examples, np.arange(5), plan)
    assert five.ids.tolist() == [0, 1, 2, 3, 4]
    assert five.mask_BT[5:].sum() == 0
    # Five rows are all that the plan allows: no sixth is added.
    tight = replace(plan, batch_tokens=40)
    assert batching.micro_batch(examples, np.arange(5), tight).tokens_BT.shape == (5, 8)


def test_rows_are_cut_where_few_sizes_pad_least():
    # Five rows of 64 in one piece are padded to six; four and one take no padding.
    plan = replace(plan_of(8, 512, 64, compiled=True), start_tokens=32)
    parts = batching.groups(np.full(5, 64), np.arange(5), plan)
    assert sorted(map(len, parts)) == [1, 4]
    plan = replace(plan, start_tokens=100)
    assert list(map(len, batching.groups(np.full(5, 64), np.arange(5), plan))) == [5]


@pytest.mark.parametrize(
    ("count", "room"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 16), (17, 24)]
)
def test_few_sizes(count, room):
    assert batching.few(count) == room


def test_the_nearest_length_with_targets():
    lengths, targets = np.array([10, 250, 256, 262]), np.array([4, 9, 0, 9])
    assert batching.nearest(lengths, targets, 256) == 1
    assert batching.nearest(lengths, targets, 12) == 0
