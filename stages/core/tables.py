"""The Parquet tables that travel between the data stages, written and read as streams.

Splits are `train`, `valid` and `test`. Column meanings:

raw: `row` int64 from 0, `line` int64 from 1, `source` the file, `kind` (text, completion, chat),
`record` the row as JSON. tokens: `row`, `tokens`, `target_mask` (element i: tokens[i] is a
target). turns, row by row beside tokens: where the row came from, `starts` the token index at which
each later question of a chat begins, `system_end` the tokens of its system prompt, `end` the index
of its end token (-1: none that is a target). examples: `example` int64 from 0, `row`, `piece`
int32, `tokens`, `target_mask`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.core import files
from stages.core.errors import UserError

SPLITS = ("train", "valid", "test")
ROWS_PER_GROUP = 4096

RAW = pa.schema(
    [
        ("row", pa.int64()),
        ("line", pa.int64()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("record", pa.string()),
    ]
)
TOKENS = pa.schema(
    [
        ("row", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("target_mask", pa.list_(pa.bool_())),
    ]
)
TURNS = pa.schema(
    [
        ("row", pa.int64()),
        ("line", pa.int64()),
        ("source", pa.string()),
        ("starts", pa.list_(pa.int32())),
        ("system_end", pa.int32()),
        ("end", pa.int32()),
    ]
)
EXAMPLES = pa.schema(
    [
        ("example", pa.int64()),
        ("row", pa.int64()),
        ("piece", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("target_mask", pa.list_(pa.bool_())),
    ]
)


@contextlib.contextmanager
def writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Open a Parquet file (zstd) that appears under its name only when the block ends well."""
    # A dictionary of token ids makes files half as large again, and takes twice the time.
    words = [field.name for field in schema if pa.types.is_string(field.type)]
    with (
        files.replacing(path) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=words) as writer,
    ):
        yield writer


def batches(
    path: Path, columns: Sequence[str] | None = None, rows_per_batch: int = ROWS_PER_GROUP
) -> Iterator[pa.RecordBatch]:
    """Read a table as a stream of record batches of at most `rows_per_batch` rows.

    Raises:
        UserError: The file is missing or is no Parquet file.
    """
    with _open(path) as file:
        yield from file.iter_batches(batch_size=rows_per_batch, columns=columns)


def rows(path: Path) -> int:
    """How many rows a table has, from its footer.

    Raises:
        UserError: The file is missing or is no Parquet file.
    """
    with _open(path) as file:
        return file.metadata.num_rows


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise UserError(
            "A table of an earlier stage is missing", where=str(path), fix="run `dvc repro`"
        ) from error
    except pa.ArrowInvalid as error:
        raise UserError(
            "A table cannot be read", where=str(path), found=error, fix="run `dvc repro -f`"
        ) from error


@dataclass(frozen=True)
class Examples:
    """One split's examples as flat arrays: about 5 bytes a token, no Python object per row.

    Attributes:
        offsets: int64 (N + 1,): example i is `tokens[offsets[i]:offsets[i + 1]]`.
        tokens: int32, all tokens end to end.
        target_mask: bool, as long as `tokens`.
        row: int64 (N,): the source row of each example.
        piece: int32 (N,): which piece of that row.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    target_mask: np.ndarray
    row: np.ndarray
    piece: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 (N,): tokens of each example."""
        return np.diff(self.offsets)

    @property
    def targets(self) -> np.ndarray:
        """int64 (N,): targets of each example; a first token can never be one."""
        counts = np.concatenate([[0], np.cumsum(self.target_mask, dtype=np.int64)])
        first = self.target_mask[self.offsets[:-1]] if len(self) else np.zeros(0, bool)
        return counts[self.offsets[1:]] - counts[self.offsets[:-1]] - first

    def example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 (T,) and target mask bool (T,) of example `i`."""
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.target_mask[span]


def read_examples(path: Path) -> Examples:
    """Read `data/examples/S.parquet` into flat arrays.

    Raises:
        UserError: The file is missing or is no Parquet file.
    """
    columns = ["row", "piece", "tokens", "target_mask"]
    parts = list(batches(path, columns))
    table = pa.Table.from_batches(parts) if parts else EXAMPLES.empty_table().select(columns)
    tokens = table["tokens"].combine_chunks()
    masks = table["target_mask"].combine_chunks()
    lengths = np.asarray(tokens.value_lengths(), dtype=np.int64)
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.asarray(tokens.flatten(), dtype=np.int32),
        target_mask=np.asarray(masks.flatten().to_numpy(zero_copy_only=False), dtype=bool),
        row=np.asarray(table["row"].combine_chunks(), dtype=np.int64),
        piece=np.asarray(table["piece"].combine_chunks(), dtype=np.int32),
    )
