"""Shards: the files that activations lie in, each with a run of the examples, shortest first.

Which example lies where follows from the lengths and the bytes of a token alone, so that a build
that was killed can go on under another plan, and no index has to be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.core import files

MOST_SHARDS = 64
"""Each is mapped into memory and keeps a file open; macOS allows a process 256."""
LEAST_BYTES = 64_000_000
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        index: From 0.
        ids: int64 (n,), its examples, in the order in which they lie.
        starts: int64 (n,), the byte at which each begins.
        bytes: Of the file.
    """

    index: int
    ids: np.ndarray
    starts: np.ndarray
    bytes: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.index:05d}.bin"


def cut(lengths: np.ndarray, bytes_per_token: int) -> list[Shard]:
    """The shards of a split: examples by length (equal ones by id), in at most `MOST_SHARDS`."""
    ids = np.argsort(lengths, kind="stable").astype(np.int64)
    ends = np.cumsum(lengths[ids], dtype=np.int64) * bytes_per_token
    total = int(ends[-1]) if len(ends) else 0
    size = max(LEAST_BYTES, -(-total // MOST_SHARDS))
    number = (np.concatenate([[0], ends[:-1]]) // size).astype(np.int64)
    shards = []
    for index, which in enumerate(np.unique(number)):
        mine = np.flatnonzero(number == which)
        starts = ends[mine] - lengths[ids[mine]] * bytes_per_token
        first = int(starts[0])
        shards.append(Shard(index, ids[mine], starts - first, int(ends[mine[-1]]) - first))
    return shards


def record(shard: Shard, sha256: str) -> dict[str, Any]:
    """What the manifest keeps of a shard."""
    return {"file": shard.name, "bytes": shard.bytes, "sha256": sha256}


def damaged(folder: Path, shards: Sequence[Shard], kept: Sequence[dict[str, Any]]) -> list[Shard]:
    """The shards of a folder that are missing or not what was written, by size and SHA-256.

    Reads every file once, two at a time; what was read stays in the system's cache for training.

    Args:
        kept: What the manifest says of the shards, by `record`.
    """
    known = {entry["file"]: entry for entry in kept}

    def whole(shard: Shard) -> bool:
        file, entry = folder / shard.name, known.get(shard.name)
        if entry is None or not file.is_file() or file.stat().st_size != shard.bytes:
            return False
        return entry == record(shard, files.sha256_file(file))

    with ThreadPoolExecutor(2) as pool:
        return [s for s, good in zip(shards, pool.map(whole, shards), strict=True) if not good]
