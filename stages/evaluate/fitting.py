"""Micro-batches that keep the evaluation under the memory budget: measured on single examples.

Without a gradient a micro-batch of n rows takes at most n times what one of its rows takes, so one
row of the longest example says how many go together. Shorter ones are tried first, so that no
measurement goes over the budget where a shorter one could have told.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from stages.core import console
from stages.core.errors import UserError
from stages.core.memory.budget import Budget
from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching
from stages.evaluate.losses import Pair

FULL = 0.9
"""Share of the room that micro-batches are cut for; the allocator's cache gets what is left."""
SMALL_BLOCK, SMALL_CHUNK = 32, 16
"""Attention blocks and pieces of the loss where nothing else fits."""


def fitted(pair: Pair, examples: Examples, plan: Plan, limit: Budget, required: bool) -> Plan:
    """The plan with as many rows at once as fit, and a cache limit that leaves room for them.

    Args:
        pair: The models; the plan of its step is changed as well.
        examples: With at least one target.
        plan: By rule; its micro-batches are never made larger.
        limit: Of the whole process.
        required: A person set it: what cannot fit is refused, else there is one line that says so.

    Raises:
        UserError: Not even one row of the longest example fits a limit that a person set.
    """
    rest = mx.get_active_memory()
    room = limit.bytes - rest
    longest = int(examples.lengths[examples.targets > 0].max())
    step = _measured(pair, examples, plan, room)
    if step > FULL * room:
        plan = replace(
            plan,
            attention_block=min(plan.attention_block or SMALL_BLOCK, SMALL_BLOCK),
            loss_chunk=min(plan.loss_chunk or SMALL_CHUNK, SMALL_CHUNK),
        )
        pair.step.plan = replace(plan, compiled=False, recompute=0)
        step = _measured(pair, examples, plan, room)
    rows = int(FULL * room // max(1, step))
    if rows < 1:
        problem = _too_large(rest, step, longest, limit)
        if required:
            raise problem
        console.warn(f"{problem.what}: {problem.found}; goes on with one row at a time")
    width = batching.width_for(longest, plan)
    rows = max(1, min(rows, batching.most_rows(width, plan)))
    cache = max(0, room - rows * step) / 1e9
    return replace(
        plan,
        batch_tokens=min(plan.batch_tokens, rows * width),
        cache_limit_gb=cache if plan.cache_limit_gb is None else min(cache, plan.cache_limit_gb),
    )


def _measured(pair: Pair, examples: Examples, plan: Plan, room: int) -> int:
    """Bytes that the longest example alone takes above rest; of a shorter one, scaled up by the
    square of the length, where that is so much that running the longest would be too much."""
    order = np.argsort(examples.lengths, kind="stable")
    order = order[examples.targets[order] > 0]
    longest = int(examples.lengths[order[-1]])
    widths = [batching.width_for(int(examples.lengths[i]), plan) for i in order]
    firsts = {width: int(i) for i, width in zip(order, widths, strict=True)}  # longest of each
    step = 0
    for width, i in firsts.items():
        micro = batching.micro_batch(examples, np.array([i]), plan)
        step = max(step, _bytes(pair, micro))
        scaled = int(step * max(1.0, longest / width) ** 2)
        if scaled <= FULL * room:
            last = batching.micro_batch(examples, order[-1:], plan)
            return _bytes(pair, last) if width < longest else step
    return step


def _bytes(pair: Pair, micro: batching.MicroBatch) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pair.score(micro)
    return max(0, mx.get_peak_memory() - before)


def _too_large(rest: int, step: int, longest: int, limit: Budget) -> UserError:
    return UserError(
        "The evaluation does not fit the memory budget",
        where="memory.budget_gb",
        found=f"{rest / 1e9:.2f} GB for the model and {step / 1e9:.2f} GB for one row of {longest}"
        f" tokens; budget {limit.gb:.2f} GB ({limit.reason})",
        expected=f"at least {(rest + step / FULL) / 1e9:.2f} GB",
        fix=f"set memory.budget_gb to {(rest + step / FULL) / 1e9:.2f} or more, lower"
        " split.max_seq_length, or take a quantized model",
    )
