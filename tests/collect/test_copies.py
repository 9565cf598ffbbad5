"""Equal rows and cuts, against dictionaries and sets in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.collect import copies


def digests(values):
    """Digests that are equal where the values are; the second half differs more often."""
    pairs = [(value // 3, value) for value in values]
    return np.array(pairs, np.uint64).reshape(-1, 2)


def pairs(found):
    return [tuple(pair) for pair in found.tolist()]


VALUES = st.lists(st.integers(0, 12), max_size=60)


@given(VALUES)
def test_repeats_are_those_of_a_dictionary(values):
    first = {}
    expected = [(i, first[v]) for i, v in enumerate(values) if first.setdefault(v, i) != i]
    assert pairs(copies.repeats(digests(values))) == expected


@given(VALUES, VALUES)
def test_leaks_are_rows_that_a_list_of_train_holds(train, other):
    expected = [(i, train.index(value)) for i, value in enumerate(other) if value in train]
    assert pairs(copies.leaks(digests(train), digests(other))) == expected


@given(st.lists(st.integers(0, 400), min_size=3, max_size=300), st.integers(0, 2**32 - 1))
def test_a_cut_keeps_equal_rows_together_and_meets_its_shares(values, seed):
    split_of = copies.cut(digests(values), {"valid": 0.2, "test": 0.1}, seed)
    where = {}
    for value, split in zip(values, split_of, strict=True):
        assert where.setdefault(value, split) == split
    largest = max(values.count(value) for value in set(values))
    if len(set(values)) >= 3:
        for split, share in ((1, 0.2), (2, 0.1)):
            rows = int((split_of == split).sum())
            wanted = max(1, round(share * len(values)))
            assert (split_of == 0).any()
            if len(set(values)) > 60:
                assert wanted <= rows < wanted + largest


def test_a_cut_depends_on_content_and_seed_alone():
    values = list(range(200))
    shares = {"valid": 0.1, "test": 0.1}
    found = dict(zip(values, copies.cut(digests(values), shares, 7), strict=True))
    backwards = values[::-1]
    again = dict(zip(backwards, copies.cut(digests(backwards), shares, 7), strict=True))
    assert again == found
    other = dict(zip(values, copies.cut(digests(values), shares, 8), strict=True))
    moved = sum(other[value] != found[value] for value in values)
    assert moved > 20


def test_a_new_row_moves_only_rows_at_the_borders():
    values = list(range(1000))
    shares = {"valid": 0.1, "test": 0.1}
    before = copies.cut(digests(values), shares, 0)
    after = copies.cut(digests([*values, 5000]), shares, 0)[:-1]
    assert int((before != after).sum()) <= 4


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (5, (3, 1, 1))]
)
def test_few_rows_fill_train_first_and_then_one_each(rows, expected):
    split_of = copies.cut(digests(range(rows)), {"valid": 0.1, "test": 0.1}, 0)
    assert tuple(int((split_of == i).sum()) for i in range(3)) == expected


def test_no_share_takes_nothing():
    assert not copies.cut(digests(range(9)), {"valid": 0.0, "test": 0.0}, 0).any()
