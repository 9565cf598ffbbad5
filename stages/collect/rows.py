"""One block of rows into the columns of `data/raw`, with all there is to say about them.

This runs in worker processes; what it returns is small and ordered like the file.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from stages.collect import forms
from stages.collect.badrow import BadRow
from stages.collect.blocks import Block
from stages.collect.jsontext import order_free, write_record

LINES_PER_NOTE = 10
PLACEHOLDER = re.compile(rb"\{\{\s*\w+\s*\}\}")


@dataclass
class Note:
    """Something worth saying about rows: how often it was seen, and the first lines it was on."""

    count: int = 0
    rows: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, count: int, line: int) -> None:
        """Count one more row."""
        self.count += count
        self.rows += 1
        if len(self.lines) < LINES_PER_NOTE:
            self.lines.append(line)

    def merge(self, other: Note) -> None:
        """Add what another block saw."""
        self.count += other.count
        self.rows += other.rows
        self.lines = [*self.lines, *other.lines][:LINES_PER_NOTE]


@dataclass
class Normalized:
    """What became of one block.

    Attributes:
        batch: Columns line, kind, record of the kept rows.
        digests: uint64 (rows, 2): equal for rows that are the same once normalized.
        rows_in: Rows found, kept or not; blank lines are none.
        rejected: (line, column, reason).
        blank: Blank lines.
        mapping: (form, mapping in words) → rows.
        notes: What was seen → how often, and where first.
        characters: int64 (rows,): characters of text in each kept row.
    """

    batch: pa.RecordBatch
    digests: np.ndarray
    characters: np.ndarray
    rows_in: int = 0
    rejected: list[tuple[int, int | None, str]] = field(default_factory=list)
    blank: list[int] = field(default_factory=list)
    mapping: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: dict[str, Note] = field(default_factory=dict)


def normalize(block: Block, rules: forms.Rules) -> Normalized:
    """Parse and normalize every row of a block; bad rows are collected, never raised."""
    kept = _Kept()
    found = Normalized(*kept.columns())
    for line, row in block.rows():
        if row is None:
            found.blank.append(line)
            continue
        found.rows_in += 1
        try:
            if isinstance(row, BadRow):
                raise row
            made, how = forms.record(row, rules)
            text = write_record(made.record, made.numbers)
        except BadRow as bad:
            found.rejected.append((line, bad.column, bad.reason))
            continue
        kept.add(line, made, text)
        found.mapping[made.form, how.describe()] += 1
        _take_notes(found.notes, line, made, how, text)
    found.batch, found.digests, found.characters = kept.columns()
    return found


class _Kept:
    """The growing columns of the rows that are kept."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.kinds: list[str] = []
        self.records: list[bytes] = []
        self.hashes: list[bytes] = []
        self.sizes: list[int] = []

    def add(self, line: int, made: forms.Record, text: bytes) -> None:
        self.lines.append(line)
        self.kinds.append(made.kind)
        self.records.append(text)
        same = order_free(made.record) if made.numbers else text
        self.hashes.append(hashlib.blake2b(same, digest_size=16).digest())
        self.sizes.append(made.characters)

    def columns(self) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
        columns = [
            pa.array(self.lines, pa.int64()),
            pa.array(self.kinds, pa.string()),
            pa.array(self.records, pa.binary()).cast(pa.string()),
        ]
        batch = pa.record_batch(columns, names=["line", "kind", "record"])
        digests = np.frombuffer(b"".join(self.hashes), dtype="<u8").reshape(-1, 2)
        return batch, digests.astype(np.uint64), np.array(self.sizes, np.int64)


def _take_notes(
    notes: dict[str, Note], line: int, made: forms.Record, how: forms.Plan, text: bytes
) -> None:
    for name, count in made.seen.items():
        if count:
            notes.setdefault(name, Note()).add(count, line)
    for key in how.unused:
        notes.setdefault(f"key {key}", Note()).add(1, line)
    if how.outvoted:
        notes.setdefault("two forms", Note()).add(1, line)
    if b"{{" in text:
        count = len(PLACEHOLDER.findall(text))
        if count:
            notes.setdefault("placeholder", Note()).add(count, line)
