"""All rows of a split, as a stream: read, render, encode on all cores, write.

While one chunk is encoded in a thread (the tokenizer lets go of Python's lock and uses all cores),
the next one is rendered. At most two chunks are in memory, whatever the number of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from tokenizers import Encoding

from stages.core import console, tables
from stages.tokenize.encode import Encoded, assemble, encode_texts
from stages.tokenize.rows import BadRow, Rendered, Renderer
from stages.tokenize.tags import Tags
from stages.tokenize.tally import Tally
from stages.tokenize.vocabulary import Vocabulary

ROWS_PER_CHUNK = 1024
CHARACTERS_PER_CHUNK = 1_000_000
ROWS_PER_READ = 256


class Origin(NamedTuple):
    """Where a row came from."""

    row: int
    line: int
    source: str
    kind: str


class Fault(NamedTuple):
    """A row that cannot be tokenized, and why."""

    source: str
    line: int
    reason: str


@dataclass
class Chunk:
    """Rows that are encoded together."""

    origins: list[Origin] = field(default_factory=list)
    rows: list[Rendered] = field(default_factory=list)
    characters: int = 0

    def add(self, origin: Origin, row: Rendered) -> None:
        """Take a row in."""
        self.origins.append(origin)
        self.rows.append(row)
        self.characters += len(row.text)

    def full(self) -> bool:
        """Whether it is time to encode it."""
        return len(self.rows) >= ROWS_PER_CHUNK or self.characters >= CHARACTERS_PER_CHUNK


@dataclass(frozen=True)
class Tokenizing:
    """What all splits share.

    Attributes:
        renderer: Rows to text.
        vocabulary: Text to tokens.
        tags: Looks for template tags in a row's own words.
        end_token: `tokenize.end_token`.
    """

    renderer: Renderer
    vocabulary: Vocabulary
    tags: Tags
    end_token: str

    def split(self, raw: Path, folder: Path, tally: Tally) -> list[Fault]:
        """Tokenize one split's table into `folder` and `folder/turns`, under the same file name.

        Args:
            raw: `data/raw/S.parquet`.
            folder: Where the two tables go.
            tally: Counts what passes.

        Returns:
            The rows that could not be rendered; with any of them the tables are no use.
        """
        faults: list[Fault] = []
        with ExitStack() as stack:
            tokens = stack.enter_context(tables.writing(folder / raw.name, tables.TOKENS))
            turns = stack.enter_context(tables.writing(folder / "turns" / raw.name, tables.TURNS))
            label = f"tokenize {raw.stem}"
            advance = stack.enter_context(console.progress(label, tables.rows(raw)))
            for chunk, encoded in self._encoded(self._chunks(raw, faults, tally)):
                kept = tally.add(chunk, encoded)
                tokens.write_batch(_token_batch(chunk, encoded).filter(kept))
                turns.write_batch(_turn_batch(chunk, encoded).filter(kept))
                advance(len(chunk.rows))
        return faults

    def _chunks(self, raw: Path, faults: list[Fault], tally: Tally) -> Iterator[Chunk]:
        """Render rows; once one is at fault the rest are rendered too, but not encoded."""
        chunk = Chunk()
        for origin, record in _records(raw):
            tally.rows_in += 1
            try:
                rendered = self.renderer.render(origin.kind, record)
            except BadRow as bad:
                faults.append(Fault(origin.source, origin.line, str(bad)))
                continue
            tag = self.tags.find(rendered.words)
            if tag:
                tally.add_tag(tag, origin)
            chunk.add(origin, rendered)
            if chunk.full():
                if not faults:
                    yield chunk
                chunk = Chunk()
        if chunk.rows and not faults:
            yield chunk

    def _encoded(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Encode chunks in order, one ahead of the one that is given out."""
        waiting: deque[tuple[Chunk, Future[list[Encoding]]]] = deque()
        with ThreadPoolExecutor(max_workers=1) as pool:
            for chunk in chunks:
                texts = [row.text for row in chunk.rows]
                waiting.append((chunk, pool.submit(encode_texts, self.vocabulary, texts)))
                if len(waiting) > 1:
                    yield self._assembled(*waiting.popleft())
            while waiting:
                yield self._assembled(*waiting.popleft())

    def _assembled(self, chunk: Chunk, coming: Future[list[Encoding]]) -> tuple[Chunk, Encoded]:
        return chunk, assemble(self.vocabulary, chunk.rows, coming.result(), self.end_token)


def _records(raw: Path) -> Iterator[tuple[Origin, str]]:
    for batch in tables.batches(raw, rows_per_batch=ROWS_PER_READ):
        columns = [batch[name].to_pylist() for name in tables.RAW.names]
        for row, line, source, kind, record in zip(*columns, strict=True):
            yield Origin(row, line, source, kind), record


def _token_batch(chunk: Chunk, encoded: Encoded) -> pa.RecordBatch:
    offsets = pa.array(encoded.offsets, pa.int32())
    return pa.record_batch(
        [
            pa.array([origin.row for origin in chunk.origins], pa.int64()),
            pa.ListArray.from_arrays(offsets, pa.array(encoded.tokens)),
            pa.ListArray.from_arrays(offsets, pa.array(encoded.mask)),
        ],
        schema=tables.TOKENS,
    )


def _turn_batch(chunk: Chunk, encoded: Encoded) -> pa.RecordBatch:
    offsets = pa.array(encoded.turn_offsets, pa.int32())
    return pa.record_batch(
        [
            pa.array([origin.row for origin in chunk.origins], pa.int64()),
            pa.array([origin.line for origin in chunk.origins], pa.int64()),
            pa.array([origin.source for origin in chunk.origins], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(encoded.turns)),
            pa.array(encoded.system_end),
            pa.array(encoded.end),
        ],
        schema=tables.TURNS,
    )
