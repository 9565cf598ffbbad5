"""Compiled variants: as many traces as the plan says, few whatever the lengths (MLX keeps each)."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from machines import settings
from small_models import VOCABULARY, build

from stages.core.config import schema
from stages.core.memory import rule, table
from stages.core.memory.work import work
from stages.core.model.trainable import attach
from stages.core.tables import Examples
from stages.core.update import batching
from stages.core.update.step import Step


class Facts:
    """What the rule reads of a manifest."""

    vocab_size, num_layers, hidden_size, dtype = VOCABULARY, 4, 64, "float32"


def random_examples(lengths):
    draw = np.random.default_rng(0)
    place = np.concatenate([np.arange(n) for n in lengths])
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=draw.integers(1, VOCABULARY, sum(lengths)).astype(np.int32),
        target_mask=place >= 2,
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def planned(examples, effective, updates):
    """(work, compiled plan) of a run."""
    given = settings(effective=effective, updates=updates, activation_cache="off")
    none = Examples(np.zeros(1, np.int64), *[np.zeros(0, np.int32)] * 4)
    plan = rule.by_rule(given, Facts, examples.lengths, "cuda")
    return work(given, examples, none), replace(plan, compiled=True, loss_chunk=32)


def test_a_run_traces_as_often_as_the_plan_says(monkeypatch):
    lengths = np.random.default_rng(1).integers(8, 120, 40).tolist()
    examples = random_examples(lengths)
    run, plan = planned(examples, effective=8, updates=15)
    model = build("llama")
    step = Step(model, attach(model, schema.Train(num_layers=2)), plan)
    traces = []
    once = step._sum
    monkeypatch.setattr(step, "_sum", lambda *given: traces.append(1) or once(*given))
    for ids in run.batches:
        total = None
        for micro in batching.micro_batches(examples, ids, plan):
            _, total = step.gradient(micro, 1000, total)
    mx.synchronize()
    assert len(run.batches) == 15
    assert len(traces) == table.variants(run, plan) > 1
    before = len(traces)
    for ids in run.batches:
        for micro in batching.micro_batches(examples, ids, plan):
            step.gradient(micro, 1000)
    assert len(traces) == before, "a second pass traces nothing anew"
    step.close()


@pytest.mark.parametrize("count", [500, 4000])
def test_more_rows_and_updates_make_no_more_of_them(count):
    """At most 8 widths, 6 numbers of rows, and 4 sizes of targets for each: a bound by hand."""
    lengths = np.random.default_rng(2).integers(8, 1024, count).tolist()
    run, plan = planned(random_examples(lengths), effective=8, updates=count // 8)
    assert len(plan.widths) <= 8
    sizes = {batching.few(n) for n in range(1, 9)}
    assert sizes == {1, 2, 3, 4, 6, 8}
    found = table.variants(run, plan)
    assert found <= len(plan.widths) * len(sizes) * 4
