"""Fixed `batch_size` and `grad_accumulation_steps`, as mlx-lm means them: counted by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from machines import MANIFEST, examples, settings

from stages.core.memory import candidates, rule
from stages.core.memory.candidates import Case
from stages.core.memory.work import work
from stages.core.update import batching

LENGTHS = [16, 16, 16, 16, 16, 16, 16, 1000]
"""One long row: padding the others to it costs more than starting a micro-batch."""


def plan(lengths, **given):
    return rule.by_rule(settings(**given), MANIFEST, np.array(lengths), "cpu")


def rows(lengths, plan):
    lengths = np.array(lengths)
    return [len(part) for part in batching.groups(lengths, np.arange(len(lengths)), plan)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [7, 1]),
        ({"batch_size": 8}, [8]),
        ({"batch_size": 4}, [4, 4]),
        ({"grad_accumulation_steps": 2}, [4, 4]),
        ({"grad_accumulation_steps": 8}, [1] * 8),
        ({"batch_size": 2, "grad_accumulation_steps": 4}, [2] * 4),
    ],
)
def test_an_update_has_the_micro_batches_that_are_asked_for(given, expected):
    assert rows(LENGTHS, plan(LENGTHS, **given)) == expected


def test_what_is_left_over_is_one_more():
    """Seven rows by three: one row alone, where that pads least."""
    assert sorted(rows(LENGTHS[1:], plan(LENGTHS, batch_size=3))) == [1, 3, 3]


@given(st.lists(st.integers(2, 2000), min_size=1, max_size=12), st.integers(1, 12))
@limits(max_examples=80, deadline=None)
def test_never_more_than_so_many_rows_need(lengths, most):
    made = plan(lengths, effective=len(lengths), batch_size=most)
    found = rows(lengths, made)
    assert len(found) == math.ceil(len(lengths) / most)
    assert max(found) <= most


@pytest.mark.parametrize("memory", [{"batch_size": 4}, {"grad_accumulation_steps": 2}])
def test_the_measured_plan_cuts_as_the_rule_does(memory):
    made = settings(**memory)
    split = examples(LENGTHS)
    limit = SimpleNamespace(bytes=1e12)
    case = Case(made, MANIFEST, "cpu", work(made, split, examples([])), limit)
    (base,) = candidates.bases(case)
    assert rows(LENGTHS, base) == rows(LENGTHS, plan(LENGTHS, **memory)) == [4, 4]
