"""How an update is shared: nothing lost, nothing twice, evenly, the same on every rank."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.memory.plan import Plan
from stages.core.update import batching
from stages.train.ranks.shares import shares

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=40)


def plan(lengths, **values):
    widths = batching.widths(lengths, 400)
    return Plan(**{"batch_size": 8, "batch_tokens": 1024, "widths": widths, **values})


def padded(lengths, share, its):
    """Padded tokens of a micro-batch that is not compiled."""
    return len(share.ids) * batching.width_for(int(lengths[share.ids].max()), its)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 9), st.sampled_from([64, 512, 4096]))
def test_every_example_is_computed_once_and_no_micro_batch_is_larger(lengths, ranks, rows, tokens):
    lengths = np.array(lengths)
    its = plan(lengths, batch_size=rows, batch_tokens=tokens)
    ids = np.arange(len(lengths))[::-1]
    found = shares(lengths, ids, its, ranks)
    assert Counter(np.concatenate([x.ids for x in found]).tolist()) == Counter(ids.tolist())
    assert [x.index for x in found] == list(range(len(found)))
    assert all(0 <= x.rank < ranks for x in found)
    for share in found:
        assert len(share.ids) <= rows
        assert len(share.ids) == 1 or padded(lengths, share, its) <= tokens


def test_one_large_micro_batch_is_cut_for_two_ranks():
    lengths = np.full(8, 32)
    found = shares(lengths, np.arange(8), plan(lengths), 2)
    assert sorted((x.rank, len(x.ids)) for x in found) == [(0, 4), (1, 4)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_get_about_equal_padded_tokens(ranks):
    draw = np.random.default_rng(0)
    lengths = np.minimum(400, draw.lognormal(4.3, 0.7, 640).astype(int) + 1)
    its = plan(lengths, batch_size=32, batch_tokens=4096)
    over = []
    for start in range(0, 640, 64):
        found = shares(lengths, np.arange(start, start + 64), its, ranks)
        loads = [
            sum(padded(lengths, x, its) + 128 for x in found if x.rank == rank)
            for rank in range(ranks)
        ]
        over.append(max(loads) / np.mean(loads))
    assert np.mean(over) < 1.1
    assert max(over) < 1.25


def test_fewer_examples_than_ranks_leave_some_without_work():
    lengths = np.array([30, 20])
    found = shares(lengths, np.arange(2), plan(lengths), 4)
    assert sorted(x.rank for x in found) == [0, 1]


def test_a_compiled_plan_is_shared_as_evenly():
    lengths = np.random.default_rng(3).integers(20, 300, 32)
    its = plan(lengths, batch_size=32, batch_tokens=4096, compiled=True)
    found = shares(lengths, np.arange(32), its, 2)
    # Padded as compiled: a power of two rows, or three quarters of one.
    room = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 6, 7: 8, 8: 8, 9: 12, 10: 12, 11: 12, 12: 12}
    room |= dict.fromkeys(range(13, 17), 16)
    loads = [0, 0]
    for x in found:
        loads[x.rank] += padded(lengths, x, its) // len(x.ids) * room[len(x.ids)]
    assert max(loads) < 1.25 * sum(loads) / 2
