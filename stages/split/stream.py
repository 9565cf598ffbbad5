"""All rows of a split, as a stream: short rows pass as they are, long ones by the policy.

Tokens are copied once, by one gather over the pieces of a whole batch; Python touches long rows
only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from stages.core import console, tables
from stages.core.config.schema import Split
from stages.core.errors import UserError
from stages.split.pieces import POLICIES, Row
from stages.split.tally import Tally

ROWS_PER_BATCH = 1024


class Batch(NamedTuple):
    """N rows as `data/tokens/` has them.

    Attributes:
        row: int64 (N,): their numbers.
        offsets: int64 (N + 1,): tokens of row i are `tokens[offsets[i]:offsets[i + 1]]`.
        tokens: int32.
        mask: bool: targets; never the first token of a row.
        line: int64 (N,): where they came from.
        source: N names.
        turn_offsets: int64 (N + 1,): into `starts`.
        starts: int32: where later questions begin.
        system_end: int32 (N,).
        end: int32 (N,): end tokens, -1 for none.
    """

    row: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    line: np.ndarray
    source: list[str]
    turn_offsets: np.ndarray
    starts: np.ndarray
    system_end: np.ndarray
    end: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64 (N,): tokens of each row."""
        return np.diff(self.offsets)


class Pieces(NamedTuple):
    """P pieces of a batch's rows, in order.

    Attributes:
        at: int64 (P,): which row of the batch.
        piece: int32 (P,): which piece of it.
        prefix, start, stop, first: int64 (P,): as in stages.split.pieces.Piece.
    """

    at: np.ndarray
    piece: np.ndarray
    prefix: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray


def split_table(tokens: Path, out: Path, settings: Split, tally: Tally) -> None:
    """Cut one split's rows into examples, `tokens` with its side table to `out`.

    Raises:
        UserError: The two tables do not belong together.
    """
    examples = 0
    with ExitStack() as stack:
        writer = stack.enter_context(tables.writing(out, tables.EXAMPLES))
        label = f"split {tokens.stem}"
        advance = stack.enter_context(console.progress(label, tables.rows(tokens)))
        for batch in read(tokens):
            pieces = cut(batch, settings)
            written = assemble(batch, pieces, examples)
            tally.add(batch, pieces, written)
            writer.write_batch(written)
            examples += len(pieces.at)
            advance(len(batch.row))


def read(tokens: Path) -> Iterator[Batch]:
    """Read `data/tokens/S.parquet` and `data/tokens/turns/S.parquet` side by side.

    Raises:
        UserError: They do not belong together.
    """
    side = tokens.parent / "turns" / tokens.name
    together = zip(
        tables.batches(tokens, rows_per_batch=ROWS_PER_BATCH),
        tables.batches(side, rows_per_batch=ROWS_PER_BATCH),
        strict=True,
    )
    if tables.rows(tokens) != tables.rows(side):
        raise _strangers(tokens, side)
    for left, right in together:
        if left["row"] != right["row"]:
            raise _strangers(tokens, side)
        mask = left["target_mask"].flatten().to_numpy(zero_copy_only=False)
        yield Batch(
            row=left["row"].to_numpy(),
            offsets=_offsets(left["tokens"]),
            tokens=left["tokens"].flatten().to_numpy(),
            mask=np.array(mask, bool),
            line=right["line"].to_numpy(),
            source=right["source"].to_pylist(),
            turn_offsets=_offsets(right["starts"]),
            starts=right["starts"].flatten().to_numpy(),
            system_end=right["system_end"].to_numpy(),
            end=right["end"].to_numpy(),
        )


def _offsets(lists: pa.ListArray) -> np.ndarray:
    lengths = np.asarray(lists.value_lengths(), dtype=np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _strangers(tokens: Path, side: Path) -> UserError:
    return UserError(
        "Two tables of the tokenize stage do not belong together",
        where=f"{tokens} and {side}",
        fix="run `dvc repro -f tokenize`",
    )


def cut(batch: Batch, settings: Split) -> Pieces:
    """The pieces of a batch's rows; rows up to the cap with a target are one piece each."""
    cap = settings.max_seq_length
    lengths = batch.lengths
    short = np.flatnonzero((lengths <= cap) & (lengths > 0))
    parts = [np.stack([short, 0 * short, 0 * short, 0 * short, lengths[short], 0 * short + 1])]
    for i in np.flatnonzero(lengths > cap):
        found = POLICIES[settings.policy](_row(batch, i), cap, settings.overlap)
        parts += [
            np.array([[i], [number], *([value] for value in piece)], np.int64)
            for number, piece in enumerate(found)
        ]
    table = np.concatenate(parts, axis=1)
    table = table[:, np.lexsort((table[1], table[0]))]
    at, piece, *rest = table[:, _trains(batch, table)]
    return Pieces(at, piece.astype(np.int32), *rest)


def _row(batch: Batch, i: int) -> Row:
    mask = batch.mask[batch.offsets[i] : batch.offsets[i + 1]]
    targets = np.flatnonzero(mask)
    return Row(
        length=len(mask),
        targets=targets[targets > 0],
        starts=batch.starts[batch.turn_offsets[i] : batch.turn_offsets[i + 1]],
        system_end=int(batch.system_end[i]),
    )


def _trains(batch: Batch, table: np.ndarray) -> np.ndarray:
    """bool: which pieces have a target."""
    before = np.concatenate([[0], np.cumsum(batch.mask, dtype=np.int64)])
    at, stop, first = table[0], table[4], table[5]
    base = batch.offsets[at]
    return before[base + stop] > before[base + np.minimum(first, stop)]


def assemble(batch: Batch, pieces: Pieces, examples: int) -> pa.RecordBatch:
    """The examples of a batch, numbered from `examples` on."""
    body = pieces.stop - pieces.start
    base = batch.offsets[pieces.at]
    # Each piece is two runs of the batch's tokens: its prefix (mostly none) and its body.
    starts = np.stack([base, base + pieces.start], axis=1).ravel()
    lengths = np.stack([pieces.prefix, body], axis=1).ravel()
    ends = np.cumsum(lengths)
    index = np.arange(ends[-1] if len(ends) else 0)
    index += np.repeat(starts - (ends - lengths), lengths)
    total = pieces.prefix + body
    context = index < np.repeat(base + pieces.first, total)
    offsets = pa.array(np.concatenate([[0], np.cumsum(total)]), pa.int32())
    count = len(pieces.at)
    return pa.record_batch(
        [
            pa.array(np.arange(examples, examples + count), pa.int64()),
            pa.array(batch.row[pieces.at]),
            pa.array(pieces.piece),
            pa.ListArray.from_arrays(offsets, pa.array(batch.tokens[index])),
            pa.ListArray.from_arrays(offsets, pa.array(batch.mask[index] & ~context)),
        ],
        schema=tables.EXAMPLES,
    )
