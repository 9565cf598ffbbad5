"""The data stages one after another, as they are started: files, exit status, contract."""

import json
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from stages.collect.__main__ import run as collect
from stages.core import entry, tables
from stages.model.__main__ import run as model
from stages.split.__main__ import run as split
from stages.tokenize.__main__ import run as tokenize
from stages.validate.__main__ import run as validate
from tests.validate import case

STAGES = {
    "collect": collect,
    "model": model,
    "tokenize": tokenize,
    "split": split,
    "validate": validate,
}


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = Path("data/source/mine")
    folder.mkdir(parents=True)
    rows = [{"prompt": f"Say {i}.", "completion": f"{i}" * 8} for i in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    params()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def params(**train):
    settings = case.settings(**train)
    settings.data.path = "data/source/mine"
    settings.split.max_seq_length = 48
    OmegaConf.save(OmegaConf.structured(settings), "params.yaml")


def start(*names):
    return [entry.stage(name, STAGES[name], []) for name in names]


def test_all_data_stages(workspace):
    assert start(*STAGES) == [0] * 5
    reports = {
        name: json.loads(Path(f"reports/{name}.json").read_text())
        for name in STAGES
        if name != "model"
    }
    for stage in ("collect", "tokenize", "split"):
        assert set(reports[stage]["splits"]) == set(tables.SPLITS)
        for counts in reports[stage]["splits"].values():
            assert {"rows_in", "rows_out", "rejected", "tokens", "targets"} <= set(counts)
    for counts in reports["tokenize"]["splits"].values():
        assert set(counts["length"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    lost = {"targets_lost", "rows_dropped", "rows_truncated", "rows_split", "end_tokens_lost"}
    assert lost <= set(reports["split"]["splits"]["train"])
    result = reports["validate"]
    assert {"ok", "checks", "updates_per_epoch", "updates", "examples", "targets"} <= set(result)
    assert result["examples"] == tables.rows(Path("data/examples/train.parquet"))
    assert (
        result["targets"] == tables.read_examples(Path("data/examples/train.parquet")).targets.sum()
    )
    assert Path("reports/lengths.png").stat().st_size > 0


def test_a_refused_run_ends_with_2_and_leaves_no_report(workspace):
    assert start("collect", "model", "tokenize", "split") == [0] * 4
    params(effective_batch_size=64)
    assert start("validate") == [2]
    error = json.loads(Path(".cache/last_error.json").read_text())
    assert error["stage"] == "validate"
    assert "32" in error["found"]
    assert "64" in error["expected"]
    assert not Path("reports/validate.json").exists()
    kept = json.loads(Path(".cache/validate.json").read_text())
    assert kept["ok"] is False


def test_a_missing_table_is_said(workspace):
    assert start("split") == [2]
    error = json.loads(Path(".cache/last_error.json").read_text())
    assert error["where"] == "data/tokens/train.parquet"
