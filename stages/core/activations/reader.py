"""Read activations as boundaries of micro-batches, ahead in a thread.

Shapes: B rows, T tokens (padded), others: the axes of an array beside batch and time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.core.activations.evict import Use
from stages.core.activations.layout import Layout, to_mlx
from stages.core.activations.shards import Shard
from stages.core.layers.staged import Boundary
from stages.core.update.batching import MicroBatch

AHEAD = 2
"""Micro-batches that are read before they are asked for."""

Key = tuple[bytes, tuple[int, ...]]
"""A micro-batch: its examples, and its rows and width."""


class Activations:
    """What the frozen layers give for the examples of one split.

    Args:
        folder: Whole and checked.
        layout, shards: It was written with.
        lengths: Tokens of each example, (N,).
        use: Keeps the folder from being evicted until `close`.

    Attributes:
        folder: Where the files lie.
        waited_s: Seconds that `boundary` has waited for the disk.
    """

    def __init__(
        self, folder: Path, layout: Layout, shards: Sequence[Shard], lengths: np.ndarray, use: Use
    ) -> None:
        self.folder = folder
        self.waited_s = 0.0
        self._layout = layout
        self._lengths = lengths
        self._use = use
        self._bytes = sum(shard.bytes for shard in shards)
        self._maps = [_mapped(folder / shard.name, shard.bytes) for shard in shards]
        self._shard = np.zeros(len(lengths), np.int64)
        self._start = np.zeros(len(lengths), np.int64)
        for shard in shards:
            self._shard[shard.ids] = shard.index
            self._start[shard.ids] = shard.starts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="activations")
        self._waiting: deque[tuple[Key, np.ndarray]] = deque()
        self._reading: dict[Key, Future] = {}

    def close(self) -> None:
        """End the thread and let go of the files."""
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)
        self._reading.clear()
        self._maps = []
        self._use.close()

    def record(self) -> dict[str, Any]:
        """For the run's report: size in GB and seconds waited."""
        return {"gb": self._bytes / 1e9, "waited_s": self.waited_s}

    def expect(self, micros: Iterable[MicroBatch]) -> None:
        """Say which micro-batches will be asked for next, in order: they are read ahead.

        What was expected before and isn't in this list is forgotten.
        """
        expected = {_key(micro): micro.ids for micro in micros}
        self._reading = {key: x for key, x in self._reading.items() if key in expected}
        self._waiting = deque((k, ids) for k, ids in expected.items() if k not in self._reading)
        self._go_on()

    def boundary(self, micro: MicroBatch) -> Boundary:
        """What the frozen layers gave for these examples, padded to the micro-batch's shape.

        Padding repeats an example's last token, and empty rows repeat row 0: nothing that a model
        does with real hidden states is undefined, as it could be with zeros.
        """
        key = _key(micro)
        self._waiting = deque(x for x in self._waiting if x[0] != key)
        reading = self._reading.pop(key, None) or self._read_soon(key, micro.ids)
        self._go_on()
        started = time.perf_counter()
        arrays = reading.result()
        self.waited_s += time.perf_counter() - started
        fields = self._layout.fields
        return {f.name: to_mlx(f, bits) for f, bits in zip(fields, arrays, strict=True)}

    def _go_on(self) -> None:
        while self._waiting and len(self._reading) < AHEAD:
            key, ids = self._waiting.popleft()
            self._reading[key] = self._read_soon(key, ids)

    def _read_soon(self, key: Key, ids: np.ndarray) -> Future:
        return self._thread.submit(self._read, ids, *key[1])

    def _read(self, ids: np.ndarray, rows: int, width: int) -> list[mx.array]:
        """The fields of a micro-batch in MLX's memory; no operation of MLX runs in this thread."""
        arrays, views = zip(*(x.empty(rows, width) for x in self._layout.fields), strict=True)
        for row, example in enumerate(ids.tolist()):
            for view, part in zip(views, self._example(example), strict=True):
                view[row, : len(part)] = part
                view[row, len(part) :] = part[-1] if len(part) else 0
        for view in views:
            view[len(ids) :] = view[0]
        return [mx.array(array) for array in arrays]

    def _example(self, example: int) -> list[np.ndarray]:
        """The fields of one example, each (T, others)."""
        length, start = int(self._lengths[example]), int(self._start[example])
        stored, parts = self._maps[self._shard[example]], []
        for field in self._layout.fields:
            end = start + length * field.bytes
            parts.append(stored[start:end].view(field.numpy).reshape(length, *field.shape))
            start = end
        return parts


def _key(micro: MicroBatch) -> Key:
    return micro.ids.tobytes(), micro.tokens_BT.shape


def _mapped(file: Path, size: int) -> np.ndarray:
    if not size:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(file, np.uint8, "r", shape=(size,)))
