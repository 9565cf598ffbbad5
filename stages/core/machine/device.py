"""The machine: the fastest BLAS before MLX is imported, threads pinned, one line that says it all.

`prepare()` must run before the first `import mlx.core`: the CPU wheel of MLX carries the reference
BLAS (1.5 GFLOP/s for a 512×576×1536 float32 product here, OpenBLAS 26 and more), and a library
loaded first with global symbols wins. Nothing of this is a dependency of a stage.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.core.errors import UserError
from stages.core.machine import blas

PRODUCT = (512, 576, 1536)
ENGINE = ("mlx", "mlx-lm", "transformers", "tokenizers")

CUDA = {
    "MLX_USE_CUDA_GRAPHS": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    "MLX_MAX_OPS_PER_BUFFER": "10",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE": "1024",
}
"""Read by MLX on CUDA; what the user has set is kept.

Micro-batches of many lengths seldom meet a graph made before: without graphs a gradient took 32 in
place of 49 ms (4B shape, 8 layers, 4 x 256 tokens, H200). With them, MLX gives up after twice as
many new graphs as its store holds (400). What an operation took is given back when its buffer of
operations ends: with 10 in a buffer a gradient of 16 x 256 tokens took 13 GB in place of 30, in the
same time. Attention is planned anew for every shape, and plans are kept.
"""


@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        kind: `cpu`, `cuda` or `metal`.
        name: Processor or GPU name.
        blas: Where the CPU's matrix products come from.
        threads: Threads OpenBLAS uses; part of "same machine and plan".
        gflops: Measured rate of one float32 product of `PRODUCT`, 0.0 where not measured.
        versions: Version of each engine package.
    """

    kind: str
    name: str
    blas: str
    threads: int
    gflops: float
    versions: dict[str, str]

    def line(self) -> str:
        """One line: device, BLAS with its rate, versions."""
        rate = f" {self.gflops:.0f} GFLOP/s" if self.gflops else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"device {self.kind} ({self.name}), BLAS {self.blas}{rate}, {versions}"

    def record(self) -> dict[str, object]:
        """The facts for run.json."""
        return asdict(self)


_blas: str | None = None


def threads() -> int:
    """OpenBLAS threads: `OPENBLAS_NUM_THREADS` where set, else the cores this process may use."""
    set_by_user = os.environ.get("OPENBLAS_NUM_THREADS", "")
    if set_by_user.isdigit() and int(set_by_user) > 0:
        return int(set_by_user)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_blas() -> str:
    """Load OpenBLAS with global symbols on Linux (system first, then the wheel) and name it.

    Elsewhere, or where none is found, MLX's own is used. Safe to call more than once.
    """
    global _blas
    if _blas is not None:
        return _blas
    _blas = "Accelerate" if sys.platform == "darwin" else "reference (slow)"
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads())
        _blas = blas.load() or _blas
    return _blas


def prepare(kind: str = "auto", measure: bool = False, tuned: bool = True) -> Device:
    """Load the BLAS, import MLX, choose its device.

    Args:
        kind: `run.device`: `auto`, `cpu` or `gpu`.
        measure: Time one matrix product (about 0.1 s) for the line.
        tuned: Run MLX with `CUDA`, not with its own defaults.

    Raises:
        UserError: A GPU was asked for and there is none.
    """
    library = load_blas()
    if tuned and sys.platform == "linux":  # Metal reads one of them too: not measured there
        for name, value in CUDA.items():
            os.environ.setdefault(name, value)
    import mlx.core as mx

    gpu = mx.is_available(mx.gpu)
    if kind == "gpu" and not gpu:
        raise UserError(
            "There is no GPU that MLX can use",
            where="run.device",
            found="gpu",
            expected="cpu or auto on this machine",
            fix="on NVIDIA install with `make setup BACKEND=cuda`",
        )
    mx.set_default_device(mx.gpu if gpu and kind != "cpu" else mx.cpu)
    on_gpu = mx.default_device() == mx.gpu
    name = "metal" if on_gpu and mx.metal.is_available() else "cuda" if on_gpu else "cpu"
    return Device(
        kind=name,
        name=_name(on_gpu),
        blas=library,
        threads=threads(),
        gflops=_gflops() if measure else 0.0,
        versions={package: importlib.metadata.version(package) for package in ENGINE},
    )


def _name(on_gpu: bool) -> str:
    import mlx.core as mx

    if on_gpu:
        return str(mx.device_info().get("device_name", "GPU"))
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gflops() -> float:
    """The rate of the product that the default model's layers are made of; best of three."""
    import mlx.core as mx

    rows, inner, columns = PRODUCT
    left, right = mx.ones((rows, inner)), mx.ones((inner, columns))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(left @ right)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best / 1e9
