"""What the parts of an update cost at least: operations, bytes, and the device's measured rates.

Counted for stacks of layers with one attention and one gated MLP (Llama, Qwen), per micro-batch of
B rows of T tokens, a product of n numbers with B·T tokens as 2·n·B·T operations:

    layer, forward     2·n·B·T + 2·B·T²·A          A: width of the attention; its causal half
    layer, backward    2·n·B·T + 4·B·T²·A          gradients of what goes in; adapters 4·n·B·T,
                                                   whole layers 2·n·B·T more
    head               4·V·D·N                     forward, and the gradient of N hidden states

Bytes: weights once per pass, what goes into and comes out of each product once; for the optimizer
seven times what is trained. A floor is the larger of operations over the matrix rate and bytes over
the memory rate. Padding counts as computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from stages.core.machine import device

PRODUCT = {"cpu": 2048, "cuda": 8192, "metal": 4096}
"""Rows and columns of the square product whose rate is measured, by device."""
COPIED = {"cpu": 64, "cuda": 1024, "metal": 256}
"""Million numbers that are read and written for the memory rate."""
TRIES = 5


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of one part."""

    operations: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Both parts together."""
        return Cost(self.operations + other.operations, self.bytes + other.bytes)


@dataclass(frozen=True)
class Rates:
    """What the device does.

    Attributes:
        operations_s: Per second, in a large square product.
        bytes_s: Read and written per second: a large array plus a number, on the CPU a large array
            copied by NumPy in as many threads as the BLAS has, since MLX does such work in one.
        product: What was multiplied, in words.
    """

    operations_s: float
    bytes_s: float
    product: str

    def floor(self, cost: Cost) -> float:
        """Seconds below which nothing can do this here."""
        return max(cost.operations / self.operations_s, cost.bytes / self.bytes_s)

    def record(self) -> dict[str, Any]:
        """As JSON-like values."""
        found = {"tflops": self.operations_s / 1e12, "gb_s": self.bytes_s / 1e9}
        return {**found, "product": self.product}


def rates(kind: str, dtype: mx.Dtype) -> Rates:
    """Measured now, the best of a few.

    Args:
        kind: `cpu`, `cuda` or `metal`.
    """
    size = PRODUCT[kind]
    square = mx.random.normal((size, size)).astype(dtype)
    large = mx.zeros((COPIED[kind] * 1_000_000,), dtype)
    mx.eval(square, large)
    product = _best(lambda x: x @ x, square)
    copied = _copied(large.nbytes) if kind == "cpu" else _best(lambda x: x + 1, large)
    name = f"{size}³ in {str(dtype).removeprefix('mlx.core.')}"
    found = Rates(2 * size**3 / product, 2 * large.nbytes / copied, name)
    del square, large
    mx.clear_cache()
    return found


def _best(make: Callable[[mx.array], mx.array], given: mx.array) -> float:
    seconds = []
    for _ in range(TRIES):
        started = time.perf_counter()
        mx.eval(make(given))
        mx.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _copied(count: int) -> float:
    """Least seconds to copy so many bytes, each thread its part."""
    many = device.threads()
    sources = [np.ones(count // many, np.uint8) for _ in range(many)]
    targets = [np.ones_like(source) for source in sources]
    seconds = []
    with ThreadPoolExecutor(many) as threads:
        for _ in range(TRIES):
            started = time.perf_counter()
            list(threads.map(np.copyto, targets, sources))
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def forward(layer: nn.Module, rows: int, width: int) -> Cost:
    """One layer."""
    tokens, cost = rows * width, Cost(2.0 * rows * width**2 * attention_width(layer))
    for numbers, size, ends, _ in products(layer):
        cost += Cost(2.0 * numbers * tokens, size + tokens * ends)
    return cost


def backward(layer: nn.Module, rows: int, width: int) -> Cost:
    """One trained layer, without what a recomputation adds."""
    tokens, cost = rows * width, Cost(4.0 * rows * width**2 * attention_width(layer))
    for numbers, size, ends, trained in products(layer):
        times = 4.0 if trained else 2.0
        cost += Cost(times * numbers * tokens, size + tokens * ends)
    return cost


def head(vocabulary: int, hidden: int, weight_bytes: int, count: int, size: int) -> Cost:
    """Head and loss at `count` positions, both ways; `size` bytes a number of hidden states."""
    return Cost(4.0 * vocabulary * hidden * count, 2.0 * (weight_bytes + count * hidden * size))


def optimizer(model: nn.Module) -> Cost:
    """Adam: weight, gradient and two moments read; weight and moments written."""
    trained = sum(x.nbytes for _, x in tree_flatten(model.trainable_parameters()))
    return Cost(0.0, 7.0 * trained)


def products(layer: nn.Module) -> Iterator[tuple[int, int, int, bool]]:
    """(numbers, bytes of the weight, bytes in and out per token, trained) of each product."""
    for _, module in layer.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            packed = 32 // module.bits if isinstance(module, nn.QuantizedLinear) else 1
            outputs, inputs = module.weight.shape[0], module.weight.shape[1] * packed
            kind = module.scales.dtype if packed > 1 else module.weight.dtype
            weight = sum(x.nbytes for _, x in tree_flatten(module.parameters()))
            trained = "weight" in module.trainable_parameters()
            yield outputs * inputs, weight, (outputs + inputs) * kind.size, trained
        for name in ("lora_a", "lora_b"):
            if name in module:
                inputs, outputs = module[name].shape
                size = module[name].dtype.size
                yield inputs * outputs, module[name].nbytes, (inputs + outputs) * size, True


def attention_width(layer: nn.Module) -> int:
    """Numbers that the attention hands to its last product, per token."""
    last = layer.self_attn.o_proj
    linear = last.linear if "linear" in last else last
    packed = 32 // linear.bits if isinstance(linear, nn.QuantizedLinear) else 1
    return linear.weight.shape[1] * packed
