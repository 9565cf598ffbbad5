"""One micro-batch's gradient in several ways of computing, in this process. Needs MLX prepared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from stages.core.layers.exponentials import cheap_swiglu
from stages.core.layers.guard import relative
from stages.core.layers.staged import Boundary
from stages.core.memory.alone import active, settle
from stages.core.memory.attention import blocked
from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching, check
from stages.core.update.batching import MicroBatch
from stages.core.update.loss import global_norm
from stages.core.update.step import Gradient, Step

WAYS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "every 4th again": {"recompute": 4},
    "every 2nd again": {"recompute": 2},
    "first half again": {"recompute": 2, "recompute_place": "first"},
    "last half again": {"recompute": 2, "recompute_place": "last"},
    "all again": {"recompute": 1},
}
"""By name: what the plan has beside the rest. The first is what the others are compared with."""


def first(examples: Examples, rows: int, plan: Plan) -> MicroBatch:
    """The first `rows` examples as one micro-batch."""
    return batching.micro_batch(examples, np.arange(rows), plan)


def boundary_of(step: Step, micro: MicroBatch) -> Boundary:
    """Output of the frozen layers, computed; {} where there is none or it can't be had."""
    cut = step.attached.cut
    if step.staged is None or not cut:
        return {}
    step.model.eval()
    with blocked(step.plan.attention_block), cheap_swiglu():
        boundary = step.staged.frozen(mx.array(micro.tokens_BT), cut)
        mx.eval(boundary)
    return boundary


def cells(step: Step, micro: MicroBatch, repeats: int, warm: bool) -> Iterator[dict[str, Any]]:
    """Least seconds and highest peak (GB above what rests) of each way; errors against the first.

    Args:
        warm: Run each once before it is timed: it is compiled then.
    """
    plan, kept = step.plan, None
    boundary = boundary_of(step, micro)
    limit = check.tolerance(step.model)
    run = lambda: step.gradient(micro, micro.targets, None, boundary)
    for way, changes in WAYS.items():
        step.plan = replace(plan, **changes)
        if warm:
            run()
        seconds, peak, (loss, gradient) = least(run, repeats)
        kept = kept or (loss, gradient)
        loss_error = relative(abs(loss - kept[0]), abs(kept[0]))
        gradient_error = distance(gradient, kept[1])
        yield {
            "way": way,
            "rows": len(micro.tokens_BT),
            "length": micro.tokens_BT.shape[1],
            "targets": micro.targets,
            "seconds": seconds,
            "peak_gb": peak / 1e9,
            "loss": loss,
            "loss_error": loss_error,
            "gradient_error": gradient_error,
            "agrees": loss_error <= limit and gradient_error <= limit,
        }
    step.plan = plan


def distance(a: Gradient, b: Gradient) -> float:
    """|a - b| / |b|, Euclidean norm over all arrays together."""
    return relative(global_norm(tree_map(mx.subtract, a, b)), global_norm(b))


def least(run: Callable[[], Any], repeats: int) -> tuple[float, int, Any]:
    """(least seconds, highest peak in bytes above what rests, what the last run gave).

    On the CPU seconds are never more than the processor's own: other programs don't count.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    seconds, peaks, found = [], [], None
    for _ in range(repeats):
        found = None
        settle()
        before = active()
        mx.reset_peak_memory()
        started, worked = time.perf_counter(), time.process_time()
        found = run()
        mx.synchronize()
        seconds.append(time.perf_counter() - started)
        if on_cpu:
            seconds[-1] = min(seconds[-1], time.process_time() - worked)
        peaks.append(mx.get_peak_memory() - before)
    return min(seconds), max(peaks), found
