"""All rows of all splits, as a stream: files → blocks → workers → Parquet.

Blocks are normalized by worker processes once there is enough to do, and come back in order, so
that the tables are the same with any number of them. Held in memory are a few blocks and 36 bytes
a row (digest, line, source, length): 1,000,000 rows stay under 2 GB.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.collect import forms, readers
from stages.collect.blocks import Block
from stages.collect.rows import Normalized, Note, normalize
from stages.collect.sources import Source
from stages.core import console
from stages.core.machine import parent
from stages.core.tables import RAW, ROWS_PER_GROUP, SPLITS, batches, writing

BYTES_WORTH_WORKERS = 24_000_000
MOST_WORKERS = 8
MOST_LISTED = 100_000

Stream = Iterable[tuple[Source, Block, int]]
"""Blocks with the file they come from and the bytes of all files read so far."""


@dataclass
class Gathered:
    """What one split's files held; `lines` and `sources` number its kept rows like `digests`."""

    names: list[str] = field(default_factory=list)
    rows_in: int = 0
    rejected_rows: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)
    blank: dict[str, Note] = field(default_factory=dict)
    mapping: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: dict[str, dict[str, Note]] = field(default_factory=dict)
    characters: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    rows_of: dict[str, int] = field(default_factory=dict)
    digests: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def rows_out(self) -> int:
        """Rows kept."""
        return len(self.lines)

    def where(self, row: int) -> dict[str, Any]:
        """Source and line of a kept row."""
        return {"source": self.names[self.sources[row]], "line": int(self.lines[row])}

    def add(self, source: str, found: Normalized) -> None:
        """Count one block, all but its rows."""
        self.rows_in += found.rows_in
        self.rows_of[source] = self.rows_of.get(source, 0) + found.rows_in
        self.rejected_rows += len(found.rejected)
        for line, column, reason in found.rejected[: MOST_LISTED - len(self.rejected)]:
            bad = {"source": source, "line": line, "column": column, "reason": reason}
            self.rejected.append(bad)
        for line in found.blank:
            self.blank.setdefault(source, Note()).add(1, line)
        self.mapping.update(found.mapping)
        for name, note in found.notes.items():
            self.notes.setdefault(name, {}).setdefault(source, Note()).merge(note)

    def part(self, chosen: np.ndarray) -> Gathered:
        """The kept rows of a mask alone, as a split of their own."""
        return Gathered(
            names=self.names,
            rows_in=int(chosen.sum()),
            characters=self.characters[chosen],
            digests=self.digests[chosen],
            lines=self.lines[chosen],
            sources=self.sources[chosen],
        )


@contextlib.contextmanager
def workers(total_bytes: int) -> Iterator[ProcessPoolExecutor | None]:
    """Worker processes where the input is worth them, else None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if total_bytes < BYTES_WORTH_WORKERS or (cores or 1) < 2:
        yield None
        return
    pool = ProcessPoolExecutor(
        min(cores or 1, MOST_WORKERS),
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(starter: int) -> None:
    """End with the process that started this one, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent.watch(lambda: os._exit(1), under_dvc=False, pid=starter)


def files_as_stream(
    sources: list[Source], rules: forms.Rules
) -> Iterator[tuple[Source, Block, int]]:
    """The blocks of some files, one file after the other."""
    before = 0
    for source in sources:
        for block, position in readers.blocks(source.path, source.name, rules):
            yield source, block, before + position
        before += source.path.stat().st_size


def gather(
    stream: Stream,
    rules: forms.Rules,
    out: Path,
    pool: ProcessPoolExecutor | None,
    progress: tuple[str, int],
) -> Gathered:
    """Write the rows of one split to `out` and say what was found.

    Args:
        stream: Its blocks.
        rules: What the settings say about forms.
        out: The Parquet file; it appears whole.
        pool: Worker processes, or None to do it here.
        progress: A label, and the bytes to be read.
    """
    gathered = Gathered()
    kept: list[tuple[np.ndarray, ...]] = []
    row, done = 0, 0
    label, total = progress
    with writing(out, RAW) as writer, console.progress(label, total // 1000, "kB") as advance:
        for source, found, position in _in_order(stream, rules, pool):
            if source.name not in gathered.rows_of:
                gathered.names.append(source.name)
            gathered.add(source.name, found)
            writer.write_batch(_raw(found.batch, row, source.name), row_group_size=ROWS_PER_GROUP)
            count = found.batch.num_rows
            origin = np.full(count, len(gathered.names) - 1, np.int32)
            lines = found.batch["line"].to_numpy()
            kept.append((found.digests, lines, origin, found.characters))
            row += count
            advance(position // 1000 - done, note=f"{row} rows")
            done = position // 1000
    if kept:
        columns = [np.concatenate(column) for column in zip(*kept, strict=True)]
        gathered.digests, gathered.lines, gathered.sources, gathered.characters = columns
    return gathered


def _in_order(
    stream: Stream, rules: forms.Rules, pool: ProcessPoolExecutor | None
) -> Iterator[tuple[Source, Normalized, int]]:
    """Normalize blocks, a few at a time with workers, and give them back in order."""
    if pool is None:
        for source, block, position in stream:
            yield source, normalize(block, rules), position
        return
    most = (pool._max_workers or 1) + 2
    waiting: deque[tuple[Source, Future[Normalized], int]] = deque()
    for source, block, position in stream:
        waiting.append((source, pool.submit(normalize, block, rules), position))
        if len(waiting) >= most:
            yield _done(*waiting.popleft())
    while waiting:
        yield _done(*waiting.popleft())


def _done(
    source: Source, future: Future[Normalized], position: int
) -> tuple[Source, Normalized, int]:
    return source, future.result(), position


def _raw(batch: pa.RecordBatch, row: int, source: str) -> pa.RecordBatch:
    rows = pa.array(np.arange(row, row + batch.num_rows, dtype=np.int64))
    names = pa.repeat(source, batch.num_rows)
    columns = [rows, batch["line"], names, batch["kind"], batch["record"]]
    return pa.record_batch(columns, schema=RAW)


def route(whole: Path, split_of: np.ndarray, folder: Path) -> None:
    """Cut one table into several by a split number for each row; rows are numbered anew.

    Args:
        whole: The table; it is removed.
        split_of: int8 (rows,): index into `SPLITS`.
        folder: Where `S.parquet` are written for the splits that get a row or are `train`.
    """
    with contextlib.ExitStack() as stack:
        writers: dict[int, pq.ParquetWriter] = {}
        for i in sorted({0, *np.unique(split_of).tolist()}):
            writers[i] = stack.enter_context(writing(folder / f"{SPLITS[i]}.parquet", RAW))
        rows, start = dict.fromkeys(writers, 0), 0
        for batch in batches(whole):
            chosen = split_of[start : start + batch.num_rows]
            start += batch.num_rows
            for i, writer in writers.items():
                part = batch.filter(pa.array(chosen == i))
                if part.num_rows:
                    ids = pa.array(np.arange(rows[i], rows[i] + part.num_rows, dtype=np.int64))
                    writer.write_batch(part.set_column(0, RAW.field(0), ids))
                    rows[i] += part.num_rows
    whole.unlink()


def write_empty(path: Path) -> None:
    """Write a table without rows: an empty split is a file too."""
    with writing(path, RAW):
        pass
