"""MLX kept from running ahead: less memory, the same numbers, its own limit back afterwards."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from small_models import VOCABULARY, build

from stages.core.config import schema
from stages.core.memory.plan import Plan
from stages.core.memory.throttle import throttled
from stages.core.model.trainable import attach
from stages.core.update.batching import MicroBatch
from stages.core.update.step import Step


def test_the_limit_is_set_and_put_back():
    before = mx.set_memory_limit(1 << 40)
    try:
        with pytest.raises(RuntimeError, match="stop"), throttled(0.5):
            assert mx.set_memory_limit(500_000_000) == 500_000_000
            raise RuntimeError("stop")
        assert mx.set_memory_limit(1 << 40) == 1 << 40
        with throttled(None):
            assert mx.set_memory_limit(1 << 40) == 1 << 40
    finally:
        mx.set_memory_limit(before)


def test_a_step_needs_less_and_gives_the_same():
    model = build("llama", hidden_size=128, intermediate_size=384)
    attached = attach(model, schema.Train(num_layers=4))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 96)).astype(np.int32)
    mask = np.ones(tokens.shape, bool)
    mask[:, 0] = False
    micro = MicroBatch(np.arange(4), tokens, mask, int(mask.sum()), tokens.size)
    plan = Plan(4, 384, (96,), recompute=1, loss_chunk=32)

    def run(step):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        loss, gradient = step.gradient(micro, micro.targets)
        return loss, dict(tree_flatten(gradient)), mx.get_peak_memory() - before

    step = Step(model, attached, plan)
    loss, wanted, free = run(step)
    limit = (mx.get_active_memory() + 0.6 * free) / 1e9
    step.plan = replace(plan, memory_limit_gb=limit)
    again, found, held = run(step)
    step.close()
    assert held < 0.9 * free
    assert again == loss
    assert all(mx.array_equal(found[name], wanted[name]).item() for name in wanted)
