import numpy as np
import pyarrow as pa
import pytest

from stages.core import tables
from stages.core.tables import RAW, Examples
from stages.core.update.step import TargetLosses
from stages.evaluate.losses import Scored
from stages.evaluate.metrics import metrics
from stages.evaluate.tally import ROWS, Tally, class_name, classes, row_table


def examples() -> Examples:
    """Row 3 in one piece, row 5 in two, row 8 without a target; lengths 4, 20, 6, 3."""
    lengths = np.array([4, 20, 6, 3])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Examples(
        offsets=offsets,
        tokens=np.zeros(33, np.int32),
        target_mask=np.zeros(33, bool),
        row=np.array([3, 5, 5, 8]),
        piece=np.array([0, 0, 1, 0], np.int32),
    )


def scored() -> Scored:
    """Five targets: one of example 0, three of example 1, one of example 2."""
    zero = np.zeros(5, np.int64)
    base = TargetLosses(
        np.array([1, 2, 3, 4, 5], np.float32), np.array([1, 0, 0, 0, 1], bool), zero, zero
    )
    tuned = TargetLosses(
        np.array([0.5, 2, 2, 1, 7], np.float32), np.array([1, 1, 1, 0, 0], bool), zero, zero
    )
    return Scored(np.array([0, 1, 1, 1, 2]), np.array([2, 7, 15, 16, 5]), base, tuned)


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "raw.parquet"
    with tables.writing(path, RAW) as writer:
        rows = range(10)
        columns = [rows, [10 * row + 1 for row in rows], [f"f{row % 2}" for row in rows]]
        columns += [["text"] * 10, ["{}"] * 10]
        writer.write_table(pa.table([list(x) for x in columns], schema=RAW))
    return path


def found(raw, leaked=()):
    tally = Tally(examples())
    tally.add(scored())
    return row_table(tally, raw, set(leaked)), tally.positions


def test_pieces_of_a_row_are_summed(raw):
    rows, _ = found(raw, leaked=[5, 9])
    table = rows.table()
    assert table.schema == ROWS
    assert table.to_pylist() == [
        {
            **{"row": 3, "source": "f1", "line": 31, "pieces": 1, "length": 4, "targets": 1},
            **{"base_loss": 1.0, "tuned_loss": 0.5, "base_correct": 1, "tuned_correct": 1},
            "also_in_train": False,
        },
        {
            **{"row": 5, "source": "f1", "line": 51, "pieces": 2, "length": 26, "targets": 4},
            **{"base_loss": 3.5, "tuned_loss": 3.0, "base_correct": 1, "tuned_correct": 2},
            "also_in_train": True,
        },
    ]


def test_metrics_by_hand(raw):
    """Base 15 / 5 = 3 nats, tuned 12.5 / 5 = 2.5; both rows improved."""
    numbers = metrics(*found(raw))
    assert numbers["base"]["loss"] == 3.0
    assert numbers["base"]["perplexity"] == pytest.approx(20.085536923187668)  # e cubed
    assert numbers["base"]["token_accuracy"] == 0.4
    assert numbers["tuned"]["loss"] == 2.5
    assert numbers["tuned"]["token_accuracy"] == 0.6
    assert (numbers["rows"], numbers["targets"]) == (2, 5)
    assert numbers["loss_change"] == -0.5
    assert numbers["improved_share"] == 1.0
    # of two rows, the resamples' ends are the rows' own changes: both -0.5
    assert (numbers["loss_change_low"], numbers["loss_change_high"]) == (-0.5, -0.5)
    assert numbers["also_in_train"] == {"rows": 0, "targets": 0}
    assert "not_in_train" not in numbers


def test_by_length_is_by_the_rows_whole_length(raw):
    by_length = metrics(*found(raw))["by_length"]
    assert by_length == [
        {"tokens": "0–15", "rows": 1, "targets": 1, "base_loss": 1.0, "tuned_loss": 0.5},
        {"tokens": "16–31", "rows": 1, "targets": 4, "base_loss": 3.5, "tuned_loss": 3.0},
    ]


def test_by_position_is_by_the_tokens_before_the_target(raw):
    by_position = metrics(*found(raw))["by_position"]
    assert by_position == [
        {"tokens": "0–15", "targets": 4, "base_loss": 2.75, "tuned_loss": 2.875},
        {"tokens": "16–31", "targets": 1, "base_loss": 4.0, "tuned_loss": 1.0},
    ]


def test_rows_that_also_stand_in_train_are_told_apart(raw):
    numbers = metrics(*found(raw, leaked=[3]))
    assert numbers["also_in_train"]["rows"] == 1
    assert numbers["also_in_train"]["base"]["loss"] == 1.0
    assert numbers["not_in_train"]["rows"] == 1
    assert numbers["not_in_train"]["tuned"]["loss"] == 3.0
    everything = metrics(*found(raw, leaked=[3, 5]))
    assert everything["also_in_train"]["targets"] == 5
    assert "not_in_train" not in everything


def test_classes_end_below_each_power_of_two():
    values = np.array([0, 15, 16, 31, 32, 1023, 1024, 1 << 20, 1 << 22])
    names = [class_name(c) for c in classes(values)]
    assert names == [
        *("0–15", "0–15", "16–31", "16–31", "32–63", "512–1023", "1024–2047"),
        *("1048576 and more", "1048576 and more"),
    ]


def test_a_model_beyond_all_bounds_still_gets_numbers(raw):
    rows, positions = found(raw)
    rows.sums.tuned[:] = 1e6
    assert np.isfinite(metrics(rows, positions)["tuned"]["perplexity"])
