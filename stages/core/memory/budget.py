"""How much memory a run may take on this machine, and the settings of MLX's allocator.

Automatic: on Metal the smaller of 80% of the recommended working set and what is available now, on
CUDA 90% of what is free on the GPU, on the CPU 60% of what is available. "Available" heeds cgroup
limits. Peak memory plus the allocator's cache must stay below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.core.memory import limits

METAL_SHARE, CUDA_SHARE, CPU_SHARE = 0.8, 0.9, 0.6


@dataclass(frozen=True)
class Budget:
    """Bytes a run may take, and one phrase that says why so many."""

    bytes: int
    reason: str

    @property
    def gb(self) -> float:
        """In GB (1e9 bytes)."""
        return self.bytes / 1e9


def budget(value: Any, kind: str, info: dict[str, Any] | None = None) -> Budget:
    """The budget of this machine now.

    Args:
        value: `memory.budget_gb`: GB, or `auto`.
        kind: `cpu`, `cuda` or `metal`.
        info: `mx.device_info()` of the GPU, on CUDA and Metal.
    """
    if value != "auto":
        return Budget(int(float(value) * 1e9), f"memory.budget_gb={value}")
    info = info or {}
    free = limits.available()
    if kind == "cuda":
        free = int(info["free_memory"])
        return Budget(int(CUDA_SHARE * free), f"90% of {free / 1e9:.1f} GB free on the GPU")
    if kind == "metal":
        working_set = int(info["max_recommended_working_set_size"])
        if METAL_SHARE * working_set <= free:
            words = f"80% of the recommended working set of {working_set / 1e9:.1f} GB"
            return Budget(int(METAL_SHARE * working_set), words)
        return Budget(free, f"{free / 1e9:.1f} GB available now")
    return Budget(int(CPU_SHARE * free), f"60% of {free / 1e9:.1f} GB available now")
