"""Sums over targets: by source row, and by how many tokens come before the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.core import tables
from stages.core.tables import Examples
from stages.evaluate.losses import Scored

ROWS = pa.schema(
    [
        ("row", pa.int64()),  # in data/raw/S.parquet
        ("source", pa.string()),
        ("line", pa.int64()),
        ("pieces", pa.int32()),  # examples the row was cut into
        ("length", pa.int64()),  # tokens of all its pieces
        ("targets", pa.int64()),
        ("base_loss", pa.float64()),  # nats per target
        ("tuned_loss", pa.float64()),
        ("base_correct", pa.int64()),  # targets that were the likeliest token
        ("tuned_correct", pa.int64()),
        ("also_in_train", pa.bool_()),
    ]
)
EDGES = np.array([0, *(2**k for k in range(4, 21))])
"""Classes of lengths and positions: below 16, then up to each next power of two."""


@dataclass(frozen=True)
class Sums:
    """Sums of a number of groups, all arrays (N,).

    Attributes:
        targets: int64.
        base, tuned: float64, sums of losses in nats.
        base_correct, tuned_correct: int64.
    """

    targets: np.ndarray
    base: np.ndarray
    tuned: np.ndarray
    base_correct: np.ndarray
    tuned_correct: np.ndarray

    @classmethod
    def zeros(cls, n: int) -> Sums:
        """Nothing counted yet in any of `n` groups."""
        counts = [np.zeros(n, np.int64) for _ in range(3)]
        losses = [np.zeros(n) for _ in range(2)]
        return cls(counts[0], *losses, *counts[1:])

    def add(self, group: np.ndarray, scored: Scored) -> None:
        """Add targets, each to its group."""
        n = len(self.targets)
        self.targets[:] += np.bincount(group, minlength=n)
        self.base[:] += np.bincount(group, scored.base.loss, minlength=n)
        self.tuned[:] += np.bincount(group, scored.tuned.loss, minlength=n)
        self.base_correct[:] += np.bincount(group[scored.base.correct], minlength=n)
        self.tuned_correct[:] += np.bincount(group[scored.tuned.correct], minlength=n)

    def grouped(self, group: np.ndarray, n: int) -> Sums:
        """Sums of coarser groups: entry i goes to `group[i]` of `n`."""
        counts = [
            np.bincount(group, x, minlength=n).round().astype(np.int64)
            for x in (self.targets, self.base_correct, self.tuned_correct)
        ]
        losses = [np.bincount(group, x, minlength=n) for x in (self.base, self.tuned)]
        return Sums(counts[0], *losses, *counts[1:])

    def chosen(self, which: np.ndarray) -> Sums:
        """The groups that a mask or index names."""
        return Sums(*(x[which] for x in vars(self).values()))


class Tally:
    """What is kept of the targets while they pass by: a few numbers per row."""

    def __init__(self, examples: Examples) -> None:
        self.row_ids, self._row_of = np.unique(examples.row, return_inverse=True)
        self.pieces = np.bincount(self._row_of, minlength=len(self.row_ids))
        lengths = np.bincount(self._row_of, examples.lengths, minlength=len(self.row_ids))
        self.length = lengths.astype(np.int64)
        self.rows = Sums.zeros(len(self.row_ids))
        self.positions = Sums.zeros(len(EDGES))

    def add(self, scored: Scored) -> None:
        """Count the targets of one micro-batch."""
        self.rows.add(self._row_of[scored.example], scored)
        self.positions.add(classes(scored.position), scored)


@dataclass(frozen=True)
class RowTable:
    """One entry per source row with at least one target, all arrays (N,)."""

    row: np.ndarray
    source: list[str]
    line: np.ndarray
    pieces: np.ndarray
    length: np.ndarray
    sums: Sums
    also_in_train: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def base_loss(self) -> np.ndarray:
        """float64 (N,): nats per target."""
        return self.sums.base / self.sums.targets

    @property
    def tuned_loss(self) -> np.ndarray:
        """float64 (N,): nats per target."""
        return self.sums.tuned / self.sums.targets

    def table(self) -> pa.Table:
        """As written to rows.parquet."""
        sums = self.sums
        columns = [self.row, self.source, self.line, self.pieces, self.length, sums.targets]
        columns += [self.base_loss, self.tuned_loss, sums.base_correct, sums.tuned_correct]
        columns += [self.also_in_train]
        arrays = [pa.array(x, field.type) for x, field in zip(columns, ROWS, strict=True)]
        return pa.Table.from_arrays(arrays, schema=ROWS)


def row_table(tally: Tally, raw: Path, leaked: set[int]) -> RowTable:
    """Join the sums with where each row came from.

    Args:
        tally: All targets of the split.
        raw: `data/raw/S.parquet`.
        leaked: Rows that also stand in train.
    """
    kept = tally.rows.targets > 0
    ids = tally.row_ids[kept]
    source, line = _origins(raw, ids)
    return RowTable(
        row=ids,
        source=source,
        line=line,
        pieces=tally.pieces[kept],
        length=tally.length[kept],
        sums=tally.rows.chosen(kept),
        also_in_train=np.isin(ids, np.array(sorted(leaked), dtype=np.int64)),
    )


def _origins(raw: Path, ids: np.ndarray) -> tuple[list[str], np.ndarray]:
    columns = ["row", "source", "line"]
    wanted = pa.array(ids)
    parts = [
        batch.filter(pc.is_in(batch["row"], value_set=wanted))
        for batch in tables.batches(raw, columns)
    ]
    found = pa.Table.from_batches(parts).sort_by("row")
    return found["source"].to_pylist(), np.asarray(found["line"], dtype=np.int64)


def classes(values: np.ndarray) -> np.ndarray:
    """The class of each length or position: `EDGES[c] <= value < EDGES[c + 1]`."""
    return np.searchsorted(EDGES, values, side="right") - 1


def class_name(c: int) -> str:
    """`0–15`, `16–31`, …, `1048576 and more`."""
    if c == len(EDGES) - 1:
        return f"{EDGES[c]} and more"
    return f"{EDGES[c]}–{EDGES[c + 1] - 1}"
