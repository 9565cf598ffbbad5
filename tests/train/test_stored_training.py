"""Training from stored activations: the run that it would have been without them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import train_workspace
from jobs import PLAN, column, make, random_examples
from processes import once

from stages.core.activations.handover import hand_over
from stages.core.activations.prepare import Source, prepare
from stages.core.config import schema
from stages.core.model.trainable import trained
from stages.core.update.batching import micro_batches
from stages.train import loop

LENGTHS = [20, 31, 9, 60, 12, 44, 33, 25, 18, 50]


def values(arrays):
    return {name: np.array(x, np.float64) for name, x in arrays.items()}


def distance(a, b, start):
    """‖a − b‖ over ‖b − start‖, over all arrays together."""
    difference = sum(((a[name] - b[name]) ** 2).sum() for name in b)
    return float(np.sqrt(difference / sum(((b[name] - start[name]) ** 2).sum() for name in b)))


def with_stored(job):
    """The same job, its frozen layers handed over to their stored output."""
    step, splits = job.step, {"train": job.examples, "valid": job.valid}
    manifest = SimpleNamespace(files={}, dtype="float32", bytes=1)
    source = Source(step.staged, step.attached.cut, manifest, step.plan, schema.Memory(), "cpu")
    stores = prepare(source, splits)
    micro = micro_batches(job.examples, np.arange(3), step.plan)[0]
    assert hand_over(step, stores["train"], micro) == ""
    return replace(job, stored=stores)


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_updates_and_validation_are_those_of_the_whole_model(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    ran = {}
    for stored in (False, True):
        job, state = make(
            tmp_path / str(stored),
            random_examples(LENGTHS),
            random_examples([12, 40, 7], seed=5),
            fine_tune_type=kind,
            updates=12,
            updates_per_eval=4,
            learning_rate=1e-4,
        )
        start = values(trained(job.step.model))
        job = with_stored(job) if stored else job
        loop.train(job, state)
        ran[stored] = (
            values(trained(job.step.model)),
            column(state, "loss"),
            column(state, "loss", "valid"),
        )
        if stored:
            with pytest.raises(RuntimeError, match="layer 0 was freed"):
                job.step.model(mx.array([[1, 2, 3]]))
        for store in job.stored.values():
            assert store.record()["waited_s"] >= 0
            store.close()
    assert distance(ran[True][0], ran[False][0], start) <= 1e-4
    assert ran[True][1] == pytest.approx(ran[False][1], rel=1e-5)
    assert ran[True][2] == pytest.approx(ran[False][2], rel=1e-5) and len(ran[True][2]) == 3


def test_the_next_update_is_read_ahead_across_the_end_of_an_epoch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    job, state = make(tmp_path, random_examples(LENGTHS), epochs=2.0, plan=PLAN)
    job = with_stored(job)
    store, asked, read = job.stored["train"], [], []
    boundary, reading = store.boundary, store._read
    store.boundary = lambda micro: (asked.append(micro.ids.tolist()), boundary(micro))[1]
    store._read = lambda ids, *shape: (read.append(ids.tolist()), reading(ids, *shape))[1]
    loop.train(job, state)
    assert sorted(i for ids in asked for i in ids) == sorted([*range(10), *range(10)])
    assert read[: len(asked)] == asked, "each once, in the order in which they are asked for"
    store.close()


@pytest.mark.slow
def test_the_stage_with_and_without_them_and_resumed(tmp_path):
    """The tiny model: adapters within 1e-4 of the change, and bit for bit after a stop."""
    train = {"updates": 10, "learning_rate": 1e-4, "updates_per_eval": 5}

    def run(name, stop_at_update=None, **memory):
        folder = tmp_path / name
        if not folder.exists():
            train_workspace.make(folder, LENGTHS, valid=[12, 40, 7])
        settings = {**train, "stop_at_update": stop_at_update}
        train_workspace.settings(folder, settings, memory=memory)
        status, said = once(folder)
        assert status == 0, said
        return said

    assert "activations" not in run("off", activation_cache="off")
    assert "activations of train: under 0.001 GB for 302 tokens" in run("auto")
    run("cut", activation_cache="on", batch_size=1)
    run("stopped", 4)
    said = run("stopped")
    assert "goes on after update 4" in said and "on the disk from before" in said

    assert train_workspace.results(tmp_path / "stopped") == train_workspace.results(
        tmp_path / "auto"
    )
    arrays = {
        name: values(mx.load(str(tmp_path / name / "adapters/adapters.safetensors")))
        for name in ("off", "auto", "cut")
    }
    start = {k: np.zeros_like(x) for k, x in arrays["off"].items() if k.endswith("lora_b")}
    for name in ("auto", "cut"):
        assert 0 <= distance(arrays[name], {k: arrays["off"][k] for k in start}, start) <= 1e-4
    report = json.loads((tmp_path / "auto/reports/train/run.json").read_text())
    assert report["plan"]["activation_cache"] is True
    assert report["activation_cache"]["train"]["gb"] == pytest.approx(302 * 64 * 4 / 1e9)
    assert not json.loads((tmp_path / "off/reports/train/run.json").read_text())["activation_cache"]
