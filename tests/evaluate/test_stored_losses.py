"""Evaluation from stored activations: the same losses, and the frozen layers do not run."""

from types import SimpleNamespace

import numpy as np

from stages.core.activations.prepare import Source, prepare
from stages.core.config import schema
from stages.core.tables import Examples
from stages.evaluate.losses import open_pair
from tests.core.small_models import build
from tests.evaluate.both import PLAN, micro, separate, write_adapters


def as_examples(batch, lengths=(9, 21, 14)):
    """The rows of a micro-batch as a split."""
    rows = range(len(lengths))
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        tokens=np.concatenate([batch.tokens_BT[row, : lengths[row]] for row in rows]),
        target_mask=np.concatenate([batch.mask_BT[row, : lengths[row]] for row in rows]),
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def with_stored(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    folder = write_adapters(tmp_path / "adapters", name)
    pair, batch = open_pair(build(name), folder, PLAN), micro()
    manifest = SimpleNamespace(files={}, dtype="float32", bytes=1)
    source = Source(pair.step.staged, pair.cut, manifest, PLAN, schema.Memory(), "cpu")
    pair.stored = prepare(source, {"test": as_examples(batch)})["test"]
    return folder, pair, batch


def test_stored_frozen_layers_give_the_losses_of_two_whole_models(tmp_path, monkeypatch):
    folder, pair, batch = with_stored(tmp_path, monkeypatch, "qwen3")
    assert pair.check(batch) == ""
    ran = []
    for index in range(4):
        watch = lambda layer, call, args, kwargs, i=index: (
            ran.append(i),
            call(layer, *args, **kwargs),
        )[1]
        pair.step.staged.run_layer_with(index, watch)
    pair.expect([batch])
    found = pair.score(batch)
    pair.close()
    (base, _), (tuned, _) = separate("qwen3", folder, batch)
    np.testing.assert_allclose(found.base.loss, base, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.tuned.loss, tuned, rtol=1e-5, atol=1e-5)
    assert np.abs(base - tuned).max() > 1e-3
    assert sorted(ran) == [2, 2, 3, 3]


def test_stored_activations_that_are_wrong_are_found_and_not_used(tmp_path, monkeypatch):
    folder, pair, batch = with_stored(tmp_path, monkeypatch, "llama")
    right = pair.stored.boundary
    pair.stored.boundary = lambda one: {name: 1.5 * x for name, x in right(one).items()}
    assert "the loss would be off" in pair.check(batch)
    found = pair.score(batch)
    pair.close()
    (base, _), (tuned, _) = separate("llama", folder, batch)
    np.testing.assert_allclose(found.base.loss, base, rtol=1e-5)
    np.testing.assert_allclose(found.tuned.loss, tuned, rtol=1e-5)
