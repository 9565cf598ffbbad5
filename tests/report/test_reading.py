"""A file that is not what its stage writes is named; no page is made of it, and no traceback."""

import json

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import UserError
from stages.report import card, inputs, page
from tests.report import example

REPORTS = [
    "data/model.json",
    "reports/collect.json",
    "reports/tokenize.json",
    "reports/split.json",
    "reports/validate.json",
    "reports/train/run.json",
    "reports/evaluate/metrics.json",
    "reports/evaluate/samples.json",
    "reports/prove.json",
]
TABLES = [f"reports/train/{name}.csv" for name in ("history", "valid", "run")]
OTHERS = ["reports/evaluate/rows.parquet", "reports/lengths.png"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    example.write(tmp_path)
    return tmp_path


def made():
    found = inputs.read(example.SETTINGS)
    return page.build(found), card.build(found)


def refused(name):
    with pytest.raises(UserError) as caught:
        made()
    assert caught.value.where == name
    assert caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize("name", [*REPORTS, *TABLES, *OTHERS])
@pytest.mark.parametrize("content", [b"", b"\x9c\x00\xff\xfe none of it"], ids=["empty", "binary"])
def test_other_bytes(folder, name, content):
    (folder / name).write_bytes(content)
    refused(name)


@pytest.mark.parametrize("name", [*REPORTS, "reports/evaluate/rows.parquet"])
def test_half_a_file(folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    refused(name)


@pytest.mark.parametrize("name", [*REPORTS, *TABLES, *OTHERS])
def test_a_folder_in_its_place(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    assert "a folder" in refused(name)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("value", [[1], None, "text", 3], ids=["list", "null", "text", "number"])
def test_json_of_another_form(folder, name, value):
    (folder / name).write_text(json.dumps(value))
    assert "keys with values" in refused(name)


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_without_its_keys_is_named_or_its_part_left_out(folder, name):
    (folder / name).write_text("{}")
    try:
        made()
    except UserError as error:
        assert error.where == name
        assert "no " in error.found


@pytest.mark.parametrize(
    ("table", "column"),
    [("history", "loss"), ("history", "targets"), ("valid", "update"), ("run", "seconds")],
)
def test_a_table_without_a_column(folder, table, column):
    name = f"reports/train/{table}.csv"
    pd.read_csv(name).drop(columns=column).to_csv(name, index=False)
    assert f"no {column}" in refused(name)


def test_words_where_numbers_belong(folder):
    name = "reports/train/history.csv"
    pd.read_csv(name).assign(loss="much").to_csv(name, index=False)
    assert "words in loss" in refused(name)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_numbers_that_are_not_finite_are_gaps(folder, value):
    for table, columns in (
        ("history", ["loss", "grad_norm"]),
        ("valid", ["loss"]),
        ("run", ["seconds", "tokens_per_second", "peak_gb"]),
    ):
        name = f"reports/train/{table}.csv"
        pd.read_csv(name).assign(**dict.fromkeys(columns, value)).to_csv(name, index=False)
    drawn = made()[0].split("</style>")[1].lower()
    assert "nan" not in drawn
    assert "infinity" not in drawn


def test_nothing_trained_on_is_no_division_by_zero(folder):
    file = folder / "reports/split.json"
    record = json.loads(file.read_text())
    for split in record["splits"].values():
        split |= {"targets": 0, "targets_lost": 0}
    file.write_text(json.dumps(record))
    for rows in (0, 1):
        example.rows(rows).to_parquet(folder / "reports/evaluate/rows.parquet")
        made()


def test_the_stage_says_it_and_ends_with_2(folder, capfd):
    from stages.report import __main__ as stage

    (folder / "params.yaml").write_text("model: {repo: 'builtin:tiny'}")
    (folder / "reports/split.json").write_text("[]")
    assert stage.entry.guarded("report", lambda: stage.run(example.SETTINGS)) == 2
    said = capfd.readouterr().err
    assert "reports/split.json" in said
    assert "Traceback" not in said
    assert not (folder / "reports/report.html").exists()
