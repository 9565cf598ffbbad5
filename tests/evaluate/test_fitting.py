"""Evaluation under a budget: what was measured on single rows holds for the micro-batches."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from stages.core.errors import UserError
from stages.core.memory.alone import settle
from stages.core.memory.budget import Budget
from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching
from stages.evaluate import fitting
from stages.evaluate.fitting import fitted
from stages.evaluate.losses import open_pair
from tests.core.small_models import VOCABULARY, build
from tests.evaluate.both import write_adapters

LENGTHS = [40] * 12 + [200] * 9 + [600] * 7
PLAN = Plan(32, 32 * 608, (48, 208, 608), attention_block=128)


def examples(lengths=LENGTHS):
    draw = np.random.default_rng(1)
    total = sum(lengths)
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=draw.integers(1, VOCABULARY, total).astype(np.int32),
        target_mask=np.ones(total, bool),
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


@pytest.fixture
def pair(tmp_path):
    found = open_pair(build("llama"), write_adapters(tmp_path / "adapters", "llama"), PLAN)
    mx.eval(found.model.parameters())
    yield found
    found.close()


def whole(pair, given, plan):
    """(highest bytes in use, sum of the tuned losses) of a pass over all examples."""
    settle()
    mx.reset_peak_memory()
    total = 0.0
    for part in batching.groups(given.lengths, np.arange(len(given)), plan):
        total += pair.score(batching.micro_batch(given, part, plan)).tuned.loss.sum(dtype=float)
    return mx.get_peak_memory(), total


def test_a_pass_stays_under_the_budget_and_gives_the_same_losses(pair):
    given = examples()
    free = fitted(pair, given, PLAN, Budget(10**12, "x"), required=True)
    assert free == replace(PLAN, cache_limit_gb=free.cache_limit_gb)
    settle()
    rest = mx.get_active_memory()
    peak, expected = whole(pair, given, free)
    limit = Budget(rest + (peak - rest) // 3, "x")
    plan = fitted(pair, given, PLAN, limit, required=True)
    assert plan.batch_tokens < PLAN.batch_tokens
    found, total = whole(pair, given, plan)
    assert found <= limit.bytes
    assert total == pytest.approx(expected, rel=1e-6)
    assert found + plan.cache_limit_gb * 1e9 <= limit.bytes * 1.05


def test_where_the_rules_plan_is_too_large_smaller_pieces_are_tried(pair, monkeypatch):
    """A row of 600 tokens takes 30 MB under the rule's plan, 9 MB in small pieces. 9/10 of the room
    are used: of 50 MB free for 1 row; of 20 MB free for none, but for 2 rows in small pieces."""
    mb = 10**6
    takes = lambda pair, micro: (30 if pair.step.plan.loss_chunk > 16 else 9) * mb
    monkeypatch.setattr(fitting, "_bytes", takes)
    given, rest = examples([600] * 8), mx.get_active_memory()
    plan = fitted(pair, given, PLAN, Budget(rest + 50 * mb, "x"), required=True)
    assert (plan.batch_tokens, plan.loss_chunk, plan.attention_block) == (608, 128, 128)
    plan = fitted(pair, given, PLAN, Budget(rest + 20 * mb, "x"), required=True)
    assert (plan.batch_tokens, plan.loss_chunk, plan.attention_block) == (2 * 608, 16, 32)
    assert (pair.step.plan.loss_chunk, pair.step.plan.attention_block) == (16, 32)
    assert plan.cache_limit_gb == pytest.approx(0.002, rel=1e-6)


def test_what_cannot_fit_is_refused_where_a_person_set_the_budget(pair, capfd):
    given = examples()
    with pytest.raises(UserError) as caught:
        fitted(pair, given, PLAN, Budget(1000, "memory.budget_gb=1e-6"), required=True)
    assert "one row of 600 tokens" in caught.value.found
    assert "memory.budget_gb" in caught.value.fix
    plan = fitted(pair, given, PLAN, Budget(1000, "60% of what is free"), required=False)
    assert plan.batch_tokens == 608
    assert plan.cache_limit_gb == 0.0
    assert "goes on with one row at a time" in " ".join(capfd.readouterr().err.split())


def test_long_examples_are_not_run_where_short_ones_tell_that_they_fit_not(pair, monkeypatch):
    widths = []
    score = pair.score
    monkeypatch.setattr(pair, "score", lambda m: widths.append(m.tokens_BT.shape) or score(m))
    with pytest.raises(UserError):
        fitted(pair, examples(), PLAN, Budget(1000, "x"), required=True)
    assert widths[:3] == [(1, 48), (1, 208), (1, 608)]
    widths.clear()
    fitted(pair, examples(), PLAN, Budget(10**12, "x"), required=True)
    assert widths == [(1, 48), (1, 608)]
