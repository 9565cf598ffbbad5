"""Messages between ranks over `mx.distributed`: numbers, arrays, gradients, JSON.

Every rank says the same things in the same order; where another one is gone, this one ends quietly.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from stages.core.machine.launch import LOST
from stages.core.update.step import Gradient

BYTES_AT_ONCE = 32 * 2**20
"""Small arrays are joined up to this size: each message costs a round of the network."""


class Messages:
    """What one rank says to the others, and hears.

    Args:
        group: Of `mx.distributed`.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.first = self.rank == 0

    def gathered(self, *numbers: float) -> np.ndarray:
        """Every rank's numbers, bit by bit: float64 (ranks, numbers)."""
        mine = mx.array(np.array(numbers, np.float64).view(np.int32))
        with _reaching():
            found = mx.distributed.all_gather(mine, group=self.group)
            mx.eval(found)
        return np.array(found).view(np.float64).reshape(self.size, len(numbers))

    def sum(self, gradient: Gradient) -> Gradient:
        """The sum over all ranks, in float32; few large messages in place of many small ones."""
        names, arrays = zip(*in_order(gradient), strict=True)
        summed: list[mx.array] = []
        for part in _joined(arrays):
            flat = mx.concatenate([x.astype(mx.float32).reshape(-1) for x in part])
            flat = self._all_sum(flat)
            ends = np.cumsum([x.size for x in part])[:-1].tolist()
            pieces = mx.split(flat, ends) if ends else [flat]
            summed += [piece.reshape(x.shape) for piece, x in zip(pieces, part, strict=True)]
        mx.eval(summed)
        return tree_unflatten(list(zip(names, summed, strict=True)))

    def tell(self, value: Any) -> Any:
        """The first rank's JSON-like value, on all ranks."""
        data = json.dumps(value).encode() if self.first else b""
        size = int(self.gathered(len(data))[0, 0])
        padded = np.zeros(-(-size // 4), np.int32)
        padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        told = np.array(self._all_sum(mx.array(padded)))
        return json.loads(told.view(np.uint8)[:size].tobytes())

    def firsts(self, tree: Any) -> Any:
        """The first rank's tree. Its shapes and types go ahead: an optimizer's state may have
        others after some updates than at the start."""
        mine = dict(in_order(tree))
        described = [[name, x.shape, str(x.dtype).split(".")[-1]] for name, x in mine.items()]
        found = []
        for name, shape, dtype in self.tell(described):
            x = mine[name] if self.first else mx.zeros(shape, getattr(mx, dtype))
            found.append((name, self._all_sum(x)))
        return tree_unflatten(found)

    def _all_sum(self, x: mx.array) -> mx.array:
        mx.eval(x)
        with _reaching():
            found = mx.distributed.all_sum(x, group=self.group)
            mx.eval(found)
        return found


def in_order(tree: Any) -> list[tuple[str, mx.array]]:
    """The arrays of a tree by name: what came from a file has another order than what was made."""
    return sorted(tree_flatten(tree), key=lambda entry: entry[0])


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """End quietly where another rank is gone: who started them all says which one, and why."""
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(LOST) from error


def _joined(arrays: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    """Consecutive arrays of at most `BYTES_AT_ONCE` together, or one larger array alone."""
    part: list[mx.array] = []
    for x in arrays:
        if part and 4 * (sum(y.size for y in part) + x.size) > BYTES_AT_ONCE:
            yield part
            part = []
        part.append(x)
    yield part
