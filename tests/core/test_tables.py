"""Tables as streams and flat arrays."""

import numpy as np
import pyarrow as pa
import pytest

from stages.core import tables
from stages.core.errors import UserError


def write(path, examples):
    with tables.writing(path, tables.EXAMPLES) as writer:
        writer.write_batch(
            pa.RecordBatch.from_pylist(
                [
                    {"example": i, "row": i, "piece": 0, "tokens": t, "target_mask": m}
                    for i, (t, m) in enumerate(examples)
                ],
                schema=tables.EXAMPLES,
            )
        )


def test_examples_come_back_as_flat_arrays(tmp_path):
    path = tmp_path / "train.parquet"
    write(path, [([5, 6, 7], [False, True, True]), ([8], [True]), ([9, 1], [True, True])])
    read = tables.read_examples(path)
    assert len(read) == 3
    assert read.lengths.tolist() == [3, 1, 2]
    assert read.example(2)[0].tolist() == [9, 1]
    # nothing predicts a first token, so it is never counted as a target
    assert read.targets.tolist() == [2, 0, 1]


def test_an_empty_split_has_no_examples(tmp_path):
    with tables.writing(tmp_path / "valid.parquet", tables.EXAMPLES):
        pass
    read = tables.read_examples(tmp_path / "valid.parquet")
    assert len(read) == 0
    assert read.targets.tolist() == []
    assert tables.rows(tmp_path / "valid.parquet") == 0


def test_many_row_groups_keep_their_order(tmp_path):
    path = tmp_path / "x.parquet"
    count = tables.ROWS_PER_GROUP + 10
    write(path, [([i], [False]) for i in range(count)])
    assert np.array_equal(tables.read_examples(path).tokens, np.arange(count))


def test_a_missing_and_a_torn_table_are_named(tmp_path):
    with pytest.raises(UserError, match="missing"):
        tables.read_examples(tmp_path / "no.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(UserError, match="cannot be read"):
        tables.read_examples(tmp_path / "torn.parquet")


def test_a_table_that_fails_midway_does_not_appear(tmp_path):
    with pytest.raises(RuntimeError), tables.writing(tmp_path / "x.parquet", tables.EXAMPLES):
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
