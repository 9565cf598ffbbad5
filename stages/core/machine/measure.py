"""Memory as MLX and the system count it, and the peak of each phase of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def phase(peaks: dict[str, float], name: str) -> Iterator[None]:
    """Measure MLX's peak memory over the block; the largest of each phase stays in `peaks` (GB)."""
    import mlx.core as mx

    mx.reset_peak_memory()
    try:
        yield
    finally:
        peaks[name] = max(peaks.get(name, 0.0), mx.get_peak_memory() / 1e9)


def memory_now() -> dict[str, float]:
    """Memory in GB (1e9 bytes): in MLX's arrays, kept by its allocator, of the whole process."""
    import mlx.core as mx

    return {
        "active_gb": mx.get_active_memory() / 1e9,
        "cache_gb": mx.get_cache_memory() / 1e9,
        "footprint_gb": footprint_gb(),
    }


def footprint_gb() -> float:
    """What the system counts as this process's memory: resident, on macOS without shared pages."""
    process = psutil.Process()
    if sys.platform == "darwin":
        return process.memory_full_info().uss / 1e9
    return process.memory_info().rss / 1e9
