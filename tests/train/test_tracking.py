"""`run.report_to`: every row of the result files reaches the tracker, and no run is harmed by it.

`wandb` here is a module that writes down its calls; mlx-lm's own callbacks import it.
"""

import csv
import json
import struct

import mlx.core as mx
import pytest
from jobs import make as make_job
from jobs import random_examples
from mlx_lm.tuner import callbacks
from processes import once
from train_workspace import make, settings

from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.update import adapters
from stages.train import loop, tracking

FAKE = """
import json

def _note(**call):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(call) + "\\n")

def init(**given):
    _note(init=given)

def log(values, step=None):
    _note(log=values, step=step)
"""


class Fake:
    """wandb in this process."""

    def __init__(self, fail_at=None):
        self.logged, self.fail_at = [], fail_at

    def init(self, **given):
        """Fails at 0."""
        if self.fail_at == 0:
            raise OSError("no network")

    def log(self, values, step):
        """Fails at its n-th call."""
        self.logged.append((step, values))
        if len(self.logged) == self.fail_at:
            raise OSError("connection lost")


def calls(folder):
    """All calls of the tracker, by run of the process that made them."""
    runs = []
    for line in (folder / "calls.jsonl").read_text().splitlines():
        call = json.loads(line)
        if "init" in call:
            runs.append((call["init"], []))
        else:
            runs[-1][1].append((call["step"], call["log"]))
    return runs


def table(file):
    """Rows of a result file: column → number, empty cells left out."""
    with open(file, newline="") as text:
        rows = list(csv.DictReader(text))
    words = {"True": 1.0, "False": 0.0}
    return [
        {key: words[cell] if cell in words else float(cell) for key, cell in row.items() if cell}
        for row in rows
    ]


def test_every_number_is_reported_and_a_resumed_run_is_reported_whole(tmp_path):
    folder = make(
        tmp_path / "work",
        [20, 30, 15, 50, 44, 9],
        valid=[12, 18],
        train={"updates": 5, "updates_per_eval": 2, "stop_at_update": 3},
        run={"report_to": "wandb"},
    )
    (folder / "wandb.py").write_text(FAKE)
    assert once(folder)[0] == 0
    settings(folder, {"updates": 5, "updates_per_eval": 2}, run={"report_to": "wandb"})
    status, said = once(folder)
    assert status == 0, said
    assert "goes on after update 3" in said
    (first, early), (second, logged) = calls(folder)
    assert [step for step, _ in early[:4]] == [1, 2, 2, 3]
    assert first["name"] == second["name"]
    assert (first["project"], first["config"]["train"]["seed"]) == ("work", 3)
    assert "memory" not in first["config"]

    history, valid = (table(folder / f"reports/train/{name}.csv") for name in ("history", "valid"))
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    told = [values for _, values in logged if "train_loss" in values]
    names = {"loss": "train_loss"}
    assert told == [
        {"iteration": row["update"], **{names.get(key, key): row[key] for key in row}}
        for row in history
    ]
    told = [values for _, values in logged if "val_loss" in values]
    assert told == [
        {
            "iteration": row["update"],
            "update": row["update"],
            **{f"val_{key}": row[key] for key in row if key != "update"},
        }
        for row in valid
    ]
    assert [row["update"] for row in history] == [1, 2, 3, 4, 5]
    assert [row["update"] for row in valid] == [2, 4, 5]


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_tracker_that_fails_changes_nothing(tmp_path, monkeypatch, capfd, fail_at):
    weights = []
    for report_to in (None, "wandb"):
        fake = Fake(fail_at)
        monkeypatch.setattr(callbacks, "wandb", fake)
        examples = random_examples([20, 9, 33, 14, 28])
        job, state = make_job(tmp_path / str(report_to), examples, random_examples([7, 11]))
        wanted = schema.Settings(run=schema.Run(report_to=report_to))
        monkeypatch.chdir(tmp_path)
        job.tracker.start(wanted, "name", state.history)
        loop.train(job, state)
        weights.append(adapters.trained(job.step.model))
    assert len(fake.logged) == fail_at
    assert capfd.readouterr().err.count("run.report_to is off, the run goes on") == 1
    assert all(mx.array_equal(weights[0][name], weights[1][name]).item() for name in weights[0])


def test_skipped_updates_have_neither_loss_nor_norm(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setattr(callbacks, "wandb", fake)
    monkeypatch.chdir(tmp_path)
    job, state = make_job(tmp_path, random_examples([20, 9, 33, 14]))
    wanted = schema.Settings(run=schema.Run(report_to="wandb"))
    job.tracker.start(wanted, "name", state.history)
    outcome = loop.micro_steps(job, 1, loop.batches_of(job, 0)[0])
    state.advance(1)
    loop.record(job, state, outcome, 1e-3, None)
    ((step, values),) = fake.logged
    assert step == 1
    assert values["learning_rate"] == 1e-3
    assert not {"train_loss", "grad_norm"} & values.keys()


def test_off_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "get_reporting_callbacks", lambda **_: pytest.fail("asked"))
    job, state = make_job(tmp_path, random_examples([20, 9, 33, 14]), updates=1)
    tracking.require(schema.Run().report_to)
    job.tracker.start(schema.Settings(), "name", state.history)
    loop.train(job, state)


def test_a_tracker_that_is_not_there_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(callbacks, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed") as error:
        tracking.require("wandb")
    assert "pip install wandb" in error.value.fix
    with pytest.raises(UserError, match="names no tracker") as error:
        tracking.require("wandbb")
    assert "nearest: wandb" in error.value.fix


def test_the_stage_refuses_a_missing_tracker(tmp_path):
    folder = make(tmp_path / "work", [20, 30, 15, 50], run={"report_to": "swanlab"})
    (folder / "swanlab.py").write_text("raise ImportError('not here')\n")
    status, said = once(folder)
    assert status == 2
    assert "swanlab is not installed" in said
    assert not (folder / "adapters").exists()


def leveldb_records(data, block=32_768, start=7):
    """Records of a log in LevelDB's form (doc/log_format.md there), after a header of 7 bytes."""
    whole, at = b"", start
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, the last part of one
            yield whole
        if kind not in (2, 3):
            whole = b""


def test_wandb_itself_keeps_every_number_offline(tmp_path, monkeypatch, capfd):
    """Where the package is installed: no network, and its file is read without it."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (pip install wandb)")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    examples = random_examples([20, 9, 33, 14, 28])
    job, state = make_job(tmp_path, examples, random_examples([7, 11]), updates=3)
    job.tracker.start(schema.Settings(run=schema.Run(report_to="wandb")), "name", state.history)
    loop.train(job, state)
    wandb.finish()
    assert "run.report_to is off" not in capfd.readouterr().err
    state.history.write(tmp_path)
    (file,) = tmp_path.rglob("*.wandb")
    found = {}
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            found.setdefault(items["_step"], {}).update(items)
    for row in table(tmp_path / "history.csv"):
        told = found[row["update"]]
        assert told["train_loss"] == row["loss"]
        others = {key: row[key] for key in row if key != "loss"}
        assert {key: told[key] for key in others} == others
    for row in table(tmp_path / "valid.csv"):
        assert found[row["update"]]["val_loss"] == row["loss"]
