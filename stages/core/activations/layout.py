"""What is stored for a token: which arrays, of which type and shape, in which order.

    example of n tokens = for each field: n x (its bytes per token), C order, little-endian

The fields are the arrays of a boundary (stages.core.layers.boundary) without their batch axis:
usually `hidden` alone. bfloat16, which NumPy does not have, is handled as uint16 with the same
bits.

Shapes: B rows, T tokens, others: the axes of an array beside batch and time.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.core.layers.staged import Boundary, StagedModel

BITS_ONLY = {"bfloat16": "uint16", "bool_": "bool"}
"""mlx's type -> the NumPy type that carries its bits, where the name differs."""


@dataclass(frozen=True)
class Field:
    """One array of the boundary.

    Attributes:
        name: In the boundary.
        dtype: mlx's name of its type.
        shape: Its axes without batch and time.
        batch, time: Which axes of the array those are, counted from the end (negative).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch: int
    time: int

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type that carries the bits."""
        return np.dtype(BITS_ONLY.get(self.dtype, self.dtype)).newbyteorder("<")

    @property
    def bytes(self) -> int:
        """Bytes per token."""
        return math.prod(self.shape) * self.numpy.itemsize

    def empty(self, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """An array as the boundary has it, not filled, and its view (B, T, others)."""
        count = len(self.shape) + 2
        shape = list(self.shape)
        for axis, size in sorted([(self.batch + count, rows), (self.time + count, width)]):
            shape.insert(axis, size)
        array = np.empty(shape, self.numpy)
        return array, self.rows(array)

    def rows(self, array: np.ndarray) -> np.ndarray:
        """The view (B, T, others) of an array of the boundary."""
        return np.moveaxis(array, (self.batch, self.time), (0, 1))


@dataclass(frozen=True)
class Layout:
    """All fields, wide types first, then by name."""

    fields: tuple[Field, ...]

    @property
    def bytes(self) -> int:
        """Bytes per token, all fields together."""
        return sum(field.bytes for field in self.fields)

    def record(self) -> list[dict[str, Any]]:
        """JSON-like values, to compare with what a folder was written with."""
        return [{**asdict(field), "shape": list(field.shape)} for field in self.fields]


def layout(staged: StagedModel, cut: int) -> Layout:
    """The layout of the boundary below `cut`, from a run that is traced but not computed.

    Raises:
        UnsupportedModel: The model cannot be cut there.
    """
    axes = staged.boundary_axes(cut)
    boundary = staged.frozen(mx.zeros((2, 3), mx.int32), cut)
    fields = []
    for name, array in boundary.items():
        outer = {axis + array.ndim for axis in axes[name]}
        shape = tuple(size for axis, size in enumerate(array.shape) if axis not in outer)
        dtype = str(array.dtype).removeprefix("mlx.core.")
        fields.append(Field(name, dtype, shape, *axes[name]))
    return Layout(tuple(sorted(fields, key=lambda x: (-x.numpy.itemsize, x.name))))


def to_numpy(boundary: Boundary, plan: Layout) -> list[np.ndarray]:
    """The fields of a computed boundary as arrays (B, T, others), in the layout's order."""
    arrays = []
    for field in plan.fields:
        array = boundary[field.name]
        array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        arrays.append(field.rows(np.array(array, copy=False)))
    return arrays


def to_mlx(field: Field, bits: mx.array) -> mx.array:
    """An array of the boundary, from `mx.array` of the one that `Field.empty` gave."""
    return bits.view(mx.bfloat16) if field.dtype == "bfloat16" else bits
