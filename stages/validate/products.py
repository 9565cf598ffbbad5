"""How much slower a model's products are than float32 ones on this CPU, by timing both once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stages.core.machine import device
from stages.core.model.manifest import Manifest

if TYPE_CHECKING:
    import mlx.core as mx

ROWS, INNER, OUTER = 256, 576, 1536
"""A product small enough to take 0.2 s where a CPU has no code for the type (1 GFLOP/s)."""


def slowdown(manifest: Manifest, kind: str) -> float | None:
    """Time of the model's product over that of a float32 one; None on a GPU.

    Args:
        manifest: Names the type and the quantization.
        kind: `run.device`.
    """
    if device.prepare(kind).kind != "cpu":
        return None
    import mlx.core as mx

    left, right = (mx.arange(n * INNER).reshape(n, INNER) % 7 - 3.0 for n in (ROWS, OUTER))
    mx.eval(left, right)
    plain = _best(lambda: left @ right.T)
    packed = manifest.quantization
    if packed is not None:
        size = {"group_size": packed["group_size"], "bits": packed["bits"]}
        weights = mx.quantize(right, **size)
        mx.eval(weights)
        return _best(lambda: mx.quantized_matmul(left, *weights, **size)) / plain
    low = getattr(mx, manifest.dtype)
    left_low, right_low = left.astype(low), right.astype(low)
    mx.eval(left_low, right_low)
    return _best(lambda: left_low @ right_low.T) / plain


def _best(product: Callable[[], mx.array]) -> float:
    import mlx.core as mx

    times = []
    for _ in range(2):
        begun = time.perf_counter()
        mx.eval(product())
        times.append(time.perf_counter() - begun)
    return min(times)
