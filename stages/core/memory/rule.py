"""A plan by a fixed rule, without measuring: small micro-batches that any machine can take.

It fills in what the planner has not measured, and every `memory.*` that a person fixed stands in
it. `stages.core.memory.choose` makes the measured plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.activations import size
from stages.core.memory.plan import Plan
from stages.core.update import batching

if TYPE_CHECKING:
    from stages.core.config.settings import Settings

TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 2048, "cuda": 8192, "metal": 4096})
"""Padded tokens of a micro-batch, by device."""

ATTENTION_BLOCK: Mapping[str, int] = MappingProxyType({"cpu": 64, "cuda": 0, "metal": 0})
"""Queries per attention block. On the CPU a block that sees no later keys saves time as well."""

COMPILED: Mapping[str, bool] = MappingProxyType({"cpu": False, "cuda": True, "metal": True})
"""Whether a micro-step is compiled, by device, as mlx-lm's own step is.

On one H200 (4B shape, 8 layers, 16 x 256 tokens) a gradient took 63 in place of 79 ms. Metal: not
measured. On a CPU MLX would compile with the system's C++ compiler, which need not be there.
"""

STARTS: Mapping[str, int] = MappingProxyType({"cpu": 128, "cuda": 2048, "metal": 128})
"""What starting a micro-batch costs, in padded tokens.

On one H200 (4B shape, 8 layers) a compiled gradient took 14 ms, and 12 ms more for each 1,000
tokens; one of a new shape 70 to 100 ms more. Metal: not measured.
"""

LOGIT_BYTES = 64e6
"""Bytes of float32 logits that one piece of the loss may have."""


def by_rule(settings: Settings, manifest: Any, lengths: np.ndarray, device_kind: str) -> Plan:
    """A conservative plan that honours every fixed `memory.*` value.

    Args:
        settings: The run's settings.
        manifest: Facts of the base model.
        lengths: Tokens of each example, trained or validated, (N,), N at least 1.
        device_kind: `cpu`, `cuda` or `metal`.
    """
    memory = settings.memory
    widths = batching.widths(lengths, settings.split.max_seq_length)
    cut = cut_fixed(settings, widths) or Plan(
        batch_size=rows_per_worker(settings),
        batch_tokens=TOKENS[device_kind],
        start_tokens=STARTS[device_kind],
        widths=widths,
    )
    return replace(
        cut,
        recompute=recompute_fixed(memory.grad_checkpoint) or 0,
        loss_chunk=_count(memory.loss_chunk, auto=loss_chunk(manifest.vocab_size, device_kind)),
        attention_block=_count(memory.attention_block, auto=ATTENTION_BLOCK[device_kind]),
        compiled=COMPILED[device_kind],
        activation_cache=size.wanted(settings, manifest, lengths),
        cache_limit_gb=None if memory.cache_limit_gb == "auto" else float(memory.cache_limit_gb),
    )


def rows_per_worker(settings: Settings) -> int:
    """Examples of one update that one worker trains, the larger part where they don't divide."""
    return math.ceil(settings.train.effective_batch_size / workers(settings))


def cut_fixed(settings: Settings, widths: tuple[int, ...]) -> Plan | None:
    """A plan with the micro-batches that the settings fix, None where they fix none.

    An update then has as few micro-batches as so many rows allow, however much is padded: no
    padding that a further one could save is worth its start.
    """
    rows = rows_fixed(settings)
    if rows is None:
        return None
    whole = rows_per_worker(settings) * widths[-1]
    return Plan(rows, rows * widths[-1], widths, start_tokens=whole)


def rows_fixed(settings: Settings) -> int | None:
    """Examples per micro-batch where the settings fix them, directly or by the steps."""
    memory = settings.memory
    if memory.batch_size != "auto":
        return min(memory.batch_size, rows_per_worker(settings))
    if memory.grad_accumulation_steps != "auto":
        return math.ceil(rows_per_worker(settings) / memory.grad_accumulation_steps)
    return None


def workers(settings: Settings) -> int:
    """Processes that share one update."""
    return settings.run.launch.workers()


def recompute_fixed(value: Any) -> int | None:
    """`memory.grad_checkpoint` as `Plan.recompute`: k of every k-th layer, 0 off, None auto."""
    return None if value == "auto" else int(value)


def loss_chunk(vocab_size: int, device_kind: str) -> int:
    """Targets per piece of the loss: 64 or 128, by the bytes of their logits; 512 on CUDA.

    There small pieces leave the device idle: a gradient with 1,648 targets took 71 ms in pieces of
    512 and 83 in pieces of 64.
    """
    if device_kind == "cuda":
        return 512
    return 128 if 128 * vocab_size * 4 <= LOGIT_BYTES / 2 else 64


def _count(value: Any, auto: int) -> int:
    return auto if value == "auto" else 0 if value == "off" else int(value)
