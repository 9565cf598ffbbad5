"""Result files as text: exact, and the same after a round trip."""

import pandas as pd
import pytest

from stages.train.history import History


def filled():
    history = History()
    history.updates.add(
        update=1,
        epoch=0.25,
        loss=2.5000000001,
        targets=10,
        tokens=12,
        learning_rate=1e-05,
        grad_norm=1 / 3,
    )
    history.updates.add(
        update=2, epoch=0.5, loss=None, targets=9, tokens=11, learning_rate=1e-05, grad_norm=None
    )
    history.valid.add(update=2, epoch=0.5, loss=2.25, targets=40, best=True)
    return history


def test_files_have_the_columns_of_the_contract(tmp_path):
    filled().write(tmp_path)
    assert (tmp_path / "history.csv").read_text() == (
        "update,epoch,loss,targets,tokens,learning_rate,grad_norm\n"
        "1,0.25,2.5,10,12,1e-05,0.333333333\n"
        "2,0.5,,9,11,1e-05,\n"
    )
    assert (tmp_path / "valid.csv").read_text() == (
        "update,epoch,loss,targets,best\n2,0.5,2.25,40,True\n"
    )
    assert (tmp_path / "run.csv").read_text() == (
        "update,seconds,tokens_per_second,active_gb,cache_gb,peak_gb,footprint_gb\n"
    )


def test_rows_come_back_as_they_were(tmp_path):
    filled().write(tmp_path / "a")
    again = History()
    again.read(tmp_path / "a")
    again.write(tmp_path / "b")
    for name in ("history.csv", "valid.csv", "run.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_pandas_reads_a_skipped_update_as_not_a_number(tmp_path):
    filled().write(tmp_path)
    table = pd.read_csv(tmp_path / "history.csv")
    assert table["loss"].isna().tolist() == [False, True]
    assert table["targets"].tolist() == [10, 9]


def test_other_columns_are_refused(tmp_path):
    filled().write(tmp_path)
    (tmp_path / "history.csv").write_text("update,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"history\.csv has the columns"):
        History().read(tmp_path)
