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
SEPARATORS = (",", ";", "\t", "|")


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
        fix="close it, or double the quotation mark",
    )


def _header(
    record: list[str] | str, name: str, line: int, rules: forms.Rules
) -> tuple[str, ...] | None:
    """The column names, None for a blank line before them."""
    if isinstance(record, str):
        raise UserError(
            "The header cannot be read",
            where=f"{name}, line {line}",
            found=record,
            expected="the names of the columns",
            fix="correct that line",
        )
    if not any(field.strip() for field in record):
        return None
    names = tuple(field.strip() for field in record)
    if len(names) == 1 and any(mark in record[0].strip() for mark in SEPARATORS):
        raise UserError(
            "The columns of a table are not told apart",
            where=f"{name}, line {line}",
            found=repr(names[0]),
            expected="a comma between columns in a .csv file, a tabulator in a .tsv file",
            fix="save it with that separator, or give it the name that fits",
        )
    check_columns(names, name, rules)
    return names


def check_columns(names: tuple[str, ...], name: str, rules: forms.Rules) -> forms.Plan:
    """Decide the form of a table by its header.

    Raises:
        UserError: Columns are ambiguous, missing, or named twice.
    """
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise UserError(
            "A column name stands twice",
            where=name,
            found=", ".join(twice),
            expected="a name of its own for each column",
            fix="rename one of them",
        )
    try:
        return forms.plan(names, rules)
    except BadRow as bad:
        raise UserError(
            "The columns of a table do not say what is the prompt and what the answer",
            where=name,
            found=bad.reason,
            expected=forms.EXPECTED,
            fix=f"name them, for example data.columns={{{_example(names)}}}",
        ) from bad


def _example(names: tuple[str, ...]) -> str:
    """`prompt: Prompt, completion: Completion` where only the spelling differs."""
    meant = {name.strip().lower(): name for name in names}
    found = {slot: meant[slot] for slot in forms.SLOTS if slot in meant and meant[slot] != slot}
    return ", ".join(
        f"{slot}: {name}"
        for slot, name in (found or {"prompt": "question", "completion": "answer"}).items()
    )


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
