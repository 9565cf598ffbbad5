"""Attention alone: what its backward pass takes, whatever stands around it; and MLX's memory."""

from __future__ import annotations

import gc
import time

import mlx.core as mx

from stages.core.memory.attention import Call, attention_in_blocks


def attention_alone(call: Call, rows: int, width: int, block: int) -> tuple[int, int, float]:
    """(bytes at the peak, bytes kept for the backward pass, seconds), beside its inputs.

    Seconds are the least of wall and processor time, without drawing the inputs.
    """
    shapes = ((call.heads, call.size), (call.kv_heads, call.size), (call.kv_heads, call.value_size))
    given = [mx.random.normal((rows, h, width, d), call.dtype) for h, d in shapes]
    mask = _mask(call, width)
    mx.eval(given)
    before, scale = active(), call.size**-0.5

    def total(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        if block:
            return attention_in_blocks(
                queries, keys, values, scale=scale, mask=mask, block=block
            ).sum()
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask
        ).sum()

    mx.reset_peak_memory()
    started, worked = time.perf_counter(), time.process_time()
    value, gradient = mx.value_and_grad(total, argnums=[0, 1, 2])(*given)
    mx.eval(value)
    kept = active() - before
    mx.eval(gradient)
    seconds = min(time.perf_counter() - started, time.process_time() - worked)
    return mx.get_peak_memory() - before, kept, seconds


def _mask(call: Call, width: int) -> mx.array | str | None:
    """A mask of the call's kind."""
    if call.masked != "array":
        return None if call.masked == "none" else call.masked
    places = mx.arange(width)
    mask = places[:, None] >= places[None]
    mx.eval(mask)
    return mask


def active() -> int:
    """Bytes in MLX's arrays now."""
    return mx.get_active_memory()


def settle() -> None:
    """Free what nothing holds, and empty the allocator's cache."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
