"""Blocks: what readers cut files into, cheap to send to another process, and how each is taken
apart into rows. One kind per way a file can hold rows.

`rows()` of a block gives (line, row) in reading order: a dict, a `BadRow`, or None for a blank
line. `line` counts from 1: the line of the file (JSONL, CSV: where the row starts, the header is
line 1), or the number of the row where a row has no line of its own (JSON arrays, Parquet).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stages.collect.badrow import BadRow
from stages.collect.jsontext import read_object

Row = tuple[int, dict[str, Any] | BadRow | None]

BLOCK_BYTES = 4_000_000
ROWS_PER_BLOCK = 2_048
SPREAD_TRIES = 20
SPREAD_LINES = 10_000


@dataclass(frozen=True)
class Lines:
    """Whole lines of a JSONL file; `first` is the number of the first one."""

    first: int
    data: bytes

    def rows(self) -> Iterator[Row]:
        """Parse line by line; an object spread over several lines is one bad row."""
        lines = self.data.removesuffix(b"\n").split(b"\n")
        tries, skip_to = 0, 0
        for i, text in enumerate(lines):
            if i < skip_to:
                continue
            line = self.first + i
            if not text or text.isspace():
                yield line, None
                continue
            try:
                yield line, read_object(text)
            except BadRow as bad:
                spread = None
                if bad.unfinished and tries < SPREAD_TRIES:
                    tries += 1
                    spread = _spread(lines, i)
                if spread is None:
                    yield line, bad
                else:
                    skip_to = spread + 1
                    yield line, _spread_row(line, self.first + spread, bad)


def _spread(lines: list[bytes], start: int) -> int | None:
    """The index of the line on which an object begun at `start` ends, or None."""
    if not lines[start].lstrip().startswith(b"{"):
        return None
    text = b"\n".join(lines[start : start + SPREAD_LINES]).decode(errors="replace")
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    rest_of_line = text.lstrip()[end:].split("\n", 1)[0]
    lasts = text.lstrip()[:end].count("\n")
    return start + lasts if not rest_of_line.strip(" \t\r,") and lasts else None


def _spread_row(first: int, last: int, bad: BadRow) -> BadRow:
    return BadRow(
        f"line {first} is not a JSON object; one object seems to be spread over lines {first} to"
        f" {last}: write each object on one line, or give the file the ending .json",
        bad.column,
    )


@dataclass(frozen=True)
class Elements:
    """Rows of a JSON array (or of JSON values one after another), as text.

    `first` numbers the first one; `at` is the line of the file each starts on.
    """

    first: int
    texts: list[bytes]
    at: list[int]

    def rows(self) -> Iterator[Row]:
        """Parse element by element."""
        for i, text in enumerate(self.texts):
            try:
                yield self.first + i, read_object(text)
            except BadRow as bad:
                where = f" (line {self.at[i] + bad.line - 1} of the file)"
                yield self.first + i, BadRow(bad.reason + where, bad.column)


@dataclass(frozen=True)
class Fields:
    """Records of a CSV or TSV file; a record that could not be cut is its reason."""

    names: tuple[str, ...]
    lines: list[int]
    records: list[list[str] | str]

    def rows(self) -> Iterator[Row]:
        """Name the fields."""
        for line, record in zip(self.lines, self.records, strict=True):
            yield line, self._row(record)

    def _row(self, record: list[str] | str) -> dict[str, Any] | BadRow | None:
        if isinstance(record, str):
            return BadRow(f"not CSV: {record}")
        if not record:
            return None
        if len(record) != len(self.names):
            found = f"{len(record)} field{'s' if len(record) > 1 else ''}"
            return BadRow(f"{found}, the header names {len(self.names)}")
        try:
            "".join(record).encode()
        except UnicodeEncodeError:
            return BadRow("not UTF-8")
        return dict(zip(self.names, record, strict=True))


@dataclass(frozen=True)
class Batch:
    """Rows of a Parquet file."""

    first: int
    batch: pa.RecordBatch

    def rows(self) -> Iterator[Row]:
        """Turn Arrow values into Python's, row by row where one of them cannot be read."""
        try:
            found: list[Any] = self.batch.to_pylist()
        except (ValueError, pa.ArrowException):
            found = [self._row(i) for i in range(self.batch.num_rows)]
        for i, row in enumerate(found):
            yield self.first + i, row

    def _row(self, i: int) -> dict[str, Any] | BadRow:
        try:
            return self.batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError:
            return BadRow("not UTF-8")
        except (ValueError, pa.ArrowException) as error:
            return BadRow(f"cannot be read: {error}")


@dataclass(frozen=True)
class Ready:
    """Rows made in this process (the built-in corpus)."""

    lines: list[int]
    values: list[dict[str, Any]]

    def rows(self) -> Iterator[Row]:
        """As they are."""
        yield from zip(self.lines, self.values, strict=True)


Block = Lines | Elements | Fields | Batch | Ready
