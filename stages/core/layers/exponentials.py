"""The same functions with cheaper exponentials, for MLX on the CPU.

MLX's `exp` and what is built on it take 12 to 16 ns an element there, on one thread, where a
product of two arrays takes 0.5 ns and `power` 4: in a small model the exponentials of SwiGLU and
softmax cost as much as the matrix products. exp(x) = 2^(x log2 e) to the rounding of float32.

Shapes: B rows, H heads, K key-value heads, G = H / K, L queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from stages.core.layers.replaced import replaced

LOG2_E = math.log2(math.e)


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device().type == mx.DeviceType.cpu


@contextmanager
def cheap_swiglu() -> Iterator[None]:
    """Let models use `swiglu` of this module inside the context, on the CPU in float32."""
    if not on_cpu():
        yield
        return
    from mlx_lm.models import activations

    original = activations.swiglu

    def replacement(gate: mx.array, x: mx.array) -> mx.array:
        return (swiglu if gate.dtype == x.dtype == mx.float32 else original)(gate, x)

    with replaced("swiglu", original, replacement):
        yield


@mx.custom_function
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """`silu(gate) * x`; the backward pass needs only the inputs and makes the sigmoid again."""
    return gate * sigmoid(gate) * x


@swiglu.vjp
def _swiglu_vjp(
    inputs: tuple[mx.array, mx.array], cotangent: mx.array, _output: mx.array
) -> tuple[mx.array, mx.array]:
    gate, x = inputs
    at = sigmoid(gate)
    silu = gate * at
    return cotangent * x * (at + silu * (1 - at)), cotangent * silu


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + exp(-x)). No gradient at large negative values: 2^-x overflows there."""
    return mx.reciprocal(1 + mx.power(2.0, x * -LOG2_E))


def logsumexp(x: mx.array) -> mx.array:
    """`mx.logsumexp` over the last axis, of float32; its gradient reuses the exponentials."""
    if not on_cpu():
        return mx.logsumexp(x, axis=-1)
    largest = mx.stop_gradient(x.max(axis=-1, keepdims=True))
    total = mx.power(2.0, (x - largest) * LOG2_E).sum(axis=-1)
    return mx.log(total) + largest.squeeze(-1)


def serves(arrays: dict[str, mx.array], mask: mx.array | str | None) -> bool:
    """Whether `attention` serves a call: float32 on the CPU, no mask or "causal", no sinks."""
    plain = "sinks" not in arrays and (mask is None or isinstance(mask, str))
    return plain and arrays["queries"].dtype == mx.float32 and on_cpu()


def attention(
    queries_BHLD: mx.array,
    keys_BKSD: mx.array,
    values_BKSD: mx.array,
    *,
    scale: float,
    mask: str | None,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`; under "causal" the last query sees all keys."""
    B, H, L, D = queries_BHLD.shape
    K, S = keys_BKSD.shape[1:3]
    rows = H // K * L
    queries_BKRD = (queries_BHLD * (scale * LOG2_E)).reshape(B, K, rows, D)
    scores_BKRS = queries_BKRD @ keys_BKSD.swapaxes(-1, -2)
    if mask == "causal" and L > 1:
        seen_LS = mx.arange(S)[None] <= mx.arange(S - L, S)[:, None]
        hidden_LS = mx.where(seen_LS, 0.0, -1e30)
        scores_BKRS = (scores_BKRS.reshape(B, K, -1, L, S) + hidden_LS).reshape(B, K, rows, S)
    largest_BKR1 = mx.stop_gradient(scores_BKRS.max(axis=-1, keepdims=True))
    weights_BKRS = mx.power(2.0, scores_BKRS - largest_BKR1)
    outputs_BKRD = weights_BKRS @ values_BKSD / weights_BKRS.sum(axis=-1, keepdims=True)
    return outputs_BKRD.reshape(B, H, L, -1)
