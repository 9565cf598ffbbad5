"""Files into blocks, as a stream: JSONL, JSON (array, object, objects), CSV, TSV and Parquet.

Compressed files (.gz, .bz2, .zst, .lz4) are read as pyarrow reads them. What makes the rest of a
file unreadable (broken compression, an unclosed quote, a torn array) is a `UserError` and never
only a bad row: nobody could say how many rows were lost behind it.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from stages.collect import arrays, forms, sheets
from stages.collect.badrow import BadRow
from stages.collect.blocks import BLOCK_BYTES, Block, Lines
from stages.collect.jsontext import BOM, read_object
from stages.core.errors import UserError

CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
WIDE_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def format_of(path: Path) -> str | None:
    """The format a file's name says, or None for a file that holds no rows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in CODECS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def blocks(path: Path, name: str, rules: forms.Rules) -> Iterator[tuple[Block, int]]:
    """Read one file as blocks, each with the bytes of the file read so far.

    Args:
        path: The file.
        name: What to call it in messages.
        rules: Which columns of a table are wanted.

    Raises:
        UserError: The file, or the rest of it, cannot be read; or a table's columns are ambiguous
            or fit no form.
    """
    kind = format_of(path)
    try:
        if kind == "parquet":
            yield from sheets.batches(path, name, rules)
        else:
            yield from _streamed(path, name, kind, rules)
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(
                "A file cannot be opened",
                where=name,
                found=error,
                expected="a file that may be read",
                fix="look at its permissions",
            ) from error
        raise UserError(
            "A file is damaged, or is not what its name says",
            where=name,
            found=str(error).splitlines()[0],
            expected=f"a whole {kind} file",
            fix="fetch or write it anew, or give it the name of what it is",
        ) from error


def _streamed(
    path: Path, name: str, kind: str | None, rules: forms.Rules
) -> Iterator[tuple[Block, int]]:
    """Read a file of text, unpacked where its name says that it is packed."""
    with pa.OSFile(str(path)) as raw:
        codec = CODECS.get(path.suffix.lower())
        stream = pa.CompressedInputStream(raw, codec) if codec and raw.size() else raw
        parts = _whole_lines(_chunks(stream, name, kind in ("csv", "tsv")))
        if kind in ("csv", "tsv"):
            delimiter = "\t" if kind == "tsv" else ","
            found: Iterator[Block] = sheets.fields(_lines(parts), name, delimiter, rules)
        else:
            found = _json(parts, name, kind == "json")
        for block in found:
            yield block, raw.tell()


def _chunks(stream: pa.NativeFile, name: str, table: bool) -> Iterator[bytes]:
    """The bytes of a stream, a byte-order mark taken off."""
    chunk = stream.read(BLOCK_BYTES)
    if chunk.startswith(WIDE_BOMS):
        raise UserError(
            "A file is not UTF-8",
            where=name,
            found="a UTF-16 or UTF-32 byte-order mark",
            expected="UTF-8, with or without a byte-order mark",
            fix="save it as UTF-8",
        )
    if _carriage_returns(chunk, table):
        raise UserError(
            "The line endings of a file cannot be read",
            where=name,
            found="lines that end with a carriage return alone (CR, as on old Macs)",
            expected="line feeds (LF), or both (CRLF)",
            fix="save it with LF line endings, for example: tr '\\r' '\\n' < OLD > NEW",
        )
    chunk = chunk.removeprefix(BOM)
    while chunk:
        yield chunk
        chunk = stream.read(BLOCK_BYTES)


def _carriage_returns(chunk: bytes, table: bool) -> bool:
    """Whether rows end with CR alone; one inside a quoted field, or between JSON tokens, may be."""
    if b"\n" in chunk or b"\r" not in chunk:
        return False
    if table:
        return b"\r" in re.sub(rb'"[^"]*"', b"x", chunk).strip()
    return re.search(rb"\}[ \t]*\r\s*\{", chunk) is not None


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup bytes so that every part ends where a line ends."""
    waiting: list[bytes] = []
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*waiting, chunk[:end]])
            waiting = []
        if end < len(chunk):
            waiting.append(chunk[end:])
    if waiting:
        yield b"".join(waiting)


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Single lines with their ends, cut at `\\n` alone, so that numbers are those of an editor."""
    for part in parts:
        start = 0
        while start < len(part):
            end = part.find(b"\n", start) + 1 or len(part)
            yield part[start:end]
            start = end


def _json(parts: Iterator[bytes], name: str, document: bool) -> Iterator[Block]:
    """JSON of either kind: lines, or values that span lines (an array, an object in a .json)."""
    blank = []
    for part in parts:
        blank.append(part)
        if not part.isspace():
            break
    head = b"".join(blank)
    rest = itertools.chain([head] if head else [], parts)
    start = head.lstrip()
    if start.startswith(b"[") or (document and _spans_lines(start)):
        yield from arrays.elements(rest, name)
        return
    line = 1
    for part in rest:
        yield Lines(line, part)
        line += part.count(b"\n")


def _spans_lines(text: bytes) -> bool:
    """Whether an object begins here that the first line does not end (else it is JSONL)."""
    if not text.startswith(b"{"):
        return False
    try:
        read_object(text.partition(b"\n")[0])
    except BadRow as bad:
        return bad.unfinished
    return False
