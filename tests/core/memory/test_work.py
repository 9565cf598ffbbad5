"""The shapes that a run's micro-batches will have, against the micro-batches themselves."""

from collections import Counter

import numpy as np
import pytest
from machines import examples, settings

from stages.core.memory import work as module
from stages.core.memory.fit import Shape
from stages.core.memory.plan import Plan
from stages.core.memory.work import work
from stages.core.update import batching

LENGTHS = np.random.default_rng(0).integers(5, 300, size=40)


def plan(tokens=600, rows=8, **others):
    return Plan(rows, tokens, batching.widths(LENGTHS, 300), **others)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [100, 600, 5000])
def test_shapes_are_those_of_the_micro_batches(tokens, compiled):
    given, cut = examples(LENGTHS), plan(tokens, compiled=compiled)
    found = work(settings(updates=7), given, examples([50]))
    wanted = Counter()
    batches = [x for e in (0, 1) for x in batching.effective_batches(40, 8, 0, e)][:7]
    for ids in batches:
        for micro in batching.micro_batches(given, ids, cut):
            wanted[Shape(*micro.tokens_BT.shape, max(1, micro.targets))] += 1
    assert found.shapes(cut) == wanted
    load = found.load(cut)
    assert dict(zip(load.shapes, load.counts, strict=True)) == wanted


def test_epochs_and_steps_are_counted():
    found = settings(updates=None)
    found.train.epochs = 1.5
    made = work(found, examples(LENGTHS), examples([]))
    assert made.updates == batching.updates_in_run(40, 8, 1.5, None)
    assert len(made.batches) == made.updates
    assert made.longest == LENGTHS.max()


def test_a_long_run_is_bounded_by_width(monkeypatch):
    monkeypatch.setattr(module, "MOST_VISITS", 16)
    given, cut = examples(LENGTHS), plan()
    found = work(settings(updates=500), given, examples([]))
    assert len(found.batches) == 2
    worst = max(shape.rows * shape.width for shape in found.load(cut).shapes)
    seen = 0
    for epoch in range(20):
        for ids in batching.effective_batches(40, 8, 0, epoch):
            for micro in batching.micro_batches(given, ids, cut):
                seen = max(seen, micro.tokens_BT.size)
    assert seen <= worst <= 600 or seen == worst


def test_longer_validation_examples_are_seen():
    found = work(settings(updates=2), examples(LENGTHS), examples([20, 700]))
    assert found.longest == 700
    assert Shape(1, 700, 690) in found.load(plan()).shapes


def test_workers_share_an_update():
    given = settings(updates=2)
    given.run.launch.hosts = 2
    found = work(given, examples(LENGTHS), examples([]))
    assert [len(ids) for ids in found.batches] == [4, 4]
    assert found.rows == 4


@pytest.mark.parametrize(("updates", "every", "count"), [(20, 10, 2), (21, 10, 3), (7, None, 1)])
def test_validations_are_counted(updates, every, count):
    given = settings(updates=updates)
    given.train.updates_per_eval = every
    assert work(given, examples(LENGTHS), examples([30])).validations == count
    assert work(given, examples(LENGTHS), examples([])).validations == 0
