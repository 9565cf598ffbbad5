"""Checkpoints: what comes back is what was saved, bad ones are passed over, old ones go."""

import json

import mlx.core as mx
import numpy as np
import pytest
from jobs import make, random_examples
from mlx.utils import tree_flatten

from stages.core import files
from stages.core.config import schema
from stages.train import loop, session
from stages.train.checkpoint import Store, bytes_on_disk

LENGTHS = [20, 31, 9, 60, 12, 44, 33, 25, 18, 50]


def everything(job, state):
    """All that a resumed run has to have, by name."""
    trained = tree_flatten(job.step.model.trainable_parameters())
    moments = tree_flatten(state.optimizer.state)
    return {
        **{f"model {name}": np.array(x) for name, x in trained},
        **{f"optimizer {name}": np.array(x) for name, x in moments},
    }


def same(a, b):
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def saved_job(folder, valid=(14, 40), **given):
    given = {"updates_per_eval": 2, "run": {"updates_per_save": 2}, **given}
    return make(folder, random_examples(LENGTHS), random_examples(valid, seed=5), **given)


def updates(job):
    return sorted(int(x.name) for x in job.store.folder.iterdir() if x.name.isdigit())


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon", "adafactor"])
def test_g11_six_and_six_updates_are_twelve_bit_for_bit(tmp_path, name):
    whole, state = saved_job(tmp_path / "whole", optimizer=name, updates=12)
    loop.train(whole, state)
    first, its = saved_job(tmp_path / "parts", optimizer=name, updates=12, stop_at_update=6)
    loop.train(first, its)
    then, fresh = saved_job(tmp_path / "parts", optimizer=name, updates=12)
    then.store.load(then.store.latest(12), fresh, then.step.model)
    assert (fresh.update, fresh.epoch, fresh.position) == (6, 2, 0)
    loop.train(then, fresh)
    assert same(everything(then, fresh), everything(whole, state))
    assert fresh.history.updates.rows == state.history.updates.rows
    assert fresh.history.valid.rows == state.history.valid.rows
    assert (fresh.best, fresh.stale) == (state.best, state.stale)
    assert len(fresh.history.run.rows) == 12


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_dropout_and_clipping_resume_bit_for_bit_too(tmp_path, kind):
    given = {
        "fine_tune_type": kind,
        "lora_parameters": schema.LoraParameters(dropout=0.3),
        "clip_norm": 0.5,
        "schedule": schema.Schedule(name="cosine", warmup=1),
    }
    whole, state = saved_job(tmp_path / "whole", **given)
    loop.train(whole, state)
    first, its = saved_job(tmp_path / "parts", stop_at_update=3, **given)
    loop.train(first, its)
    then, fresh = saved_job(tmp_path / "parts", **given)
    mx.random.seed(999)
    then.store.load(then.store.latest(6), fresh, then.step.model)
    loop.train(then, fresh)
    assert same(everything(then, fresh), everything(whole, state))
    assert fresh.history.updates.rows == state.history.updates.rows


def test_the_last_ones_and_the_best_arrays_are_kept(tmp_path, monkeypatch):
    losses = iter([5.0, 3.0, 4.0, 4.5, 4.6, 4.7])
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(losses))
    run = {"updates_per_save": 1, "keep_last": 3}
    job, state = saved_job(tmp_path, updates=12, run=run)
    loop.train(job, state)
    assert updates(job) == [10, 11, 12]
    assert [x.name for x in (job.store.folder / "best").iterdir()] == ["00000004.safetensors"]
    links = {(x / "best.safetensors").stat().st_ino for x in job.store.folder.glob("0*")}
    assert links == {job.store.best_file(4).stat().st_ino}


def test_an_older_checkpoint_brings_its_own_best_back(tmp_path, monkeypatch):
    losses = iter([5.0, 3.0, 1.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(losses))
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    assert state.best.update == 6
    again, fresh = saved_job(tmp_path)
    fourth = files.sha256_file(job.store.folder / "00000004" / "best.safetensors")
    again.store.load(again.store.latest(5), fresh, again.step.model)
    assert (fresh.update, fresh.best.update) == (4, 4)
    assert files.sha256_file(again.store.best_file(4)) == fourth


@pytest.mark.parametrize(
    "name", ["adapters.safetensors", "optimizer.safetensors", "history.csv", "state.json"]
)
def test_a_torn_checkpoint_is_passed_over_with_one_line(tmp_path, capsys, name):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    assert updates(job) == [4, 6]
    file = job.store.folder / "00000006" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    capsys.readouterr()
    assert job.store.latest(6).record["update"] == 4
    assert said(capsys).count("checkpoint of update 6 is passed over") == 1


def test_a_missing_file_and_another_version_are_passed_over(tmp_path, capsys):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    (job.store.folder / "00000006" / "optimizer.safetensors").unlink()
    file = job.store.folder / "00000004" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    assert job.store.latest(6) is None
    assert "update 4 is passed over: it is of version 99, not 1" in said(capsys)


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path, capsys):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    stranger = Store(job.store.folder, "another")
    assert stranger.latest(6) is None
    assert "it belongs to another run (run)" in said(capsys)


def test_a_run_that_shall_end_earlier_takes_an_earlier_checkpoint(tmp_path):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    assert job.store.latest(5).record["update"] == 4
    assert job.store.latest(3) is None


def test_going_back_does_not_prune_what_it_saves(tmp_path):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    early, its = saved_job(tmp_path, stop_at_update=2, run={"updates_per_save": 1, "keep_last": 1})
    loop.train(early, its)
    assert updates(early) == [2, 4, 6]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    job, state = saved_job(tmp_path, stop_at_update=2)
    loop.train(job, state)
    before = files.sha256_file(job.store.folder / "00000002" / "state.json")

    def refuse(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(state.history, "write", refuse)
    state.update = 3
    with pytest.raises(OSError, match="Input/output"):
        job.store.save(state, job.step, 2)
    assert updates(job) == [2]
    assert not list(job.store.folder.glob(".tmp-*"))
    assert files.sha256_file(job.store.folder / "00000002" / "state.json") == before


def test_leftovers_of_a_killed_write_are_removed(tmp_path):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    (job.store.folder / ".tmp-00000007-abc").mkdir()
    job.store.latest(6)
    assert not list(job.store.folder.glob(".tmp-*"))


def test_clearing_leaves_the_locks(tmp_path):
    job, state = saved_job(tmp_path)
    loop.train(job, state)
    (job.store.folder / "lock").write_text("1")
    job.store.clear()
    assert [x.name for x in job.store.folder.iterdir()] == ["lock"]


def test_the_disk_that_checkpoints_take_is_known_before(tmp_path):
    job, state = saved_job(tmp_path, run={"updates_per_save": 1, "keep_last": 2})
    moments = dict(tree_flatten(state.optimizer.state))
    predicted = bytes_on_disk(job.step.model, moments, keep_last=2)
    loop.train(job, state)
    arrays = {f.stat().st_ino: f.stat().st_size for f in job.store.folder.rglob("*.safetensors")}
    # In its place: two checkpoints and one best; the prediction has one more of each.
    trained = sum(x.nbytes for _, x in tree_flatten(job.step.model.trainable_parameters()))
    expected = 3 * (trained + 2 * trained) + 2 * trained
    assert predicted == pytest.approx(expected, rel=0.01)
    assert sum(arrays.values()) < predicted * 1.1


def test_a_full_disk_is_refused_before_training(tmp_path, monkeypatch):
    job, state = saved_job(tmp_path)
    monkeypatch.setattr(files, "free_gb", lambda _: 1e-6)
    with pytest.raises(session.UserError, match="no room for this run's checkpoints"):
        session.require_room(job, state)
