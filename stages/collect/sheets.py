"""Tables: CSV, TSV and Parquet, whose columns decide the form once for the whole file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from stages.collect import forms
from stages.collect.badrow import BadRow
from stages.collect.blocks import BLOCK_BYTES, ROWS_PER_BLOCK, Batch, Fields
from stages.core.errors import UserError

LARGEST_FIELD = 2**31 - 1


def fields(
    lines: Iterator[bytes], name: str, delimiter: str, rules: forms.Rules
) -> Iterator[Fields]:
    """Cut CSV or TSV into records; every field stays the text it is.

    Args:
        lines: The file's lines with their ends, without a byte-order mark.
        name: What to call the file in messages.
        delimiter: "," or a tabulator.
        rules: Which columns are wanted.

    Raises:
        UserError: The columns do not fit, or a quoted field is never closed.
    """
    csv.field_size_limit(LARGEST_FIELD)
    reader = csv.reader(
        (line.decode("utf-8", "surrogateescape") for line in lines),
        delimiter=delimiter,
        strict=True,
    )
    header: tuple[str, ...] | None = None
    numbers, records, size = [], [], 0
    while True:
        line = reader.line_num + 1
        try:
            record: list[str] | str = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise _unclosed(name, line) from error
            record = str(error)
        if header is None:
            header = _header(record, name, line, rules)
            continue
        numbers.append(line)
        records.append(record)
        size += sum(map(len, record))
        if size >= BLOCK_BYTES or len(records) >= ROWS_PER_BLOCK * 4:
            yield Fields(header, numbers, records)
            numbers, records, size = [], [], 0
    if header is not None and records:
        yield Fields(header, numbers, records)


def _unclosed(name: str, line: int) -> UserError:
    return UserError(
        "A quoted field is never closed",
        where=f"{name}, line {line}",
        found="a quotation mark that opens a field, and no second one to the end of the file",
        expected='"…" around a field, "" for a quotation mark inside it',
    )


def _header(
    record: list[str] | str, name: str, line: int, rules: forms.Rules
) -> tuple[str, ...] | None:
    """The column names, None for a blank line before them."""
    if isinstance(record, str):
        raise UserError("The header cannot be read", where=f"{name}, line {line}", found=record)
    if not any(field.strip() for field in record):
        return None
    names = tuple(field.strip() for field in record)
    check_columns(names, name, rules)
    return names


def check_columns(names: tuple[str, ...], name: str, rules: forms.Rules) -> forms.Plan:
    """Decide the form of a table by its header.

    Raises:
        UserError: Columns are ambiguous, missing, or named twice.
    """
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise UserError("A column name stands twice", where=name, found=", ".join(twice))
    try:
        return forms.plan(names, rules)
    except BadRow as bad:
        raise UserError(
            "The columns of a table do not say what is the prompt and what the answer",
            where=name,
            found=bad.reason,
            expected=forms.EXPECTED,
            fix="name them, for example data.columns={prompt: question, completion: answer}",
        ) from bad


def batches(path: Path, name: str, rules: forms.Rules) -> Iterator[tuple[Batch, int]]:
    """Read the columns that a form can use, a batch at a time, with the bytes read so far.

    Raises:
        UserError: The columns do not fit.
    """
    size, first = path.stat().st_size, 1
    with pq.ParquetFile(path) as file:
        check_columns(tuple(file.schema_arrow.names), name, rules)
        wanted = {*forms.KNOWN, *(column for _, column in rules.columns)}
        columns = [column for column in file.schema_arrow.names if column in wanted]
        total = max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=ROWS_PER_BLOCK, columns=columns):
            yield Batch(first, batch), size * (first + batch.num_rows) // total
            first += batch.num_rows
