"""Checked on the whole model first, then the frozen layers are freed, or not even read again."""

import gc
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from stages.core import files
from stages.core.activations import handover
from stages.core.activations.prepare import Source, prepare
from stages.core.config import schema
from stages.core.layers.staged import UnsupportedModel
from stages.core.memory.plan import Plan
from stages.core.model import models
from stages.core.model.trainable import attach
from stages.core.update import batching
from stages.core.update.loss import global_norm
from stages.core.update.step import Step
from tests.core.activations.made import PLAN, examples, manifest
from tests.core.small_models import _BASE, build

CUT = 3
LOWER, UPPER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


def write_model(folder, tied):
    """A llama whose embedding and lower layers lie in a file of their own; 3 MB a layer."""
    shape = {"intermediate_size": 4096, "vocab_size": 4000, "tie_word_embeddings": tied}
    model = build("llama" if tied else "llama_untied", **shape)
    lower, upper = {}, {}
    for name, array in tree_flatten(model.parameters()):
        low = "embed_tokens" in name or any(f"layers.{i}." in name for i in range(CUT))
        (lower if low else upper)[name] = array
    folder.mkdir()
    mx.save_safetensors(str(folder / LOWER), lower)
    mx.save_safetensors(str(folder / UPPER), upper)
    (folder / "config.json").write_text(json.dumps({**_BASE, **shape, "model_type": "llama"}))
    return sum(x.nbytes for x in upper.values()), sum(x.nbytes for x in lower.values())


def spoil(folder):
    """NaN in place of everything that the frozen layers and the embedding are made of."""
    arrays = mx.load(str(folder / LOWER))
    nan = {name: mx.full(x.shape, float("nan")) for name, x in arrays.items()}
    mx.eval(nan)
    mx.save_safetensors(str(folder / LOWER), nan)


class Run:
    """One run: the model read lazily, LoRA on the last layer, activations, handed over."""

    def __init__(self, folder, split, plan=PLAN, kind="lora"):
        model, _ = models.load_model(folder, "stored", lazy=True)
        train = schema.Train(num_layers=len(model.layers) - CUT, updates=1, fine_tune_type=kind)
        self.step = Step(model, attach(model, train), plan)
        self.checks, check = [], self.step.check
        self.step.check = lambda micro: (self.checks.append(1), check(micro))[1]
        facts = manifest(model)
        source = Source(self.step.staged, CUT, facts, plan, schema.Memory(), "cpu")
        self.store = prepare(source, {"train": split})["train"]
        self.micros = batching.micro_batches(split, np.arange(len(split)), plan)
        self.reason = handover.hand_over(self.step, self.store, self.micros[0])

    def trained(self):
        """Losses, and trained arrays after three steps of plain gradient descent."""
        losses = []
        for micro in self.micros:
            loss, gradient = self.step.gradient(micro, 10, None, self.store.boundary(micro))
            losses.append(loss)
            pairs = zip(
                tree_flatten(self.step.model.trainable_parameters()),
                tree_flatten(gradient),
                strict=True,
            )
            values = [(name, value - 0.1 * slope) for (name, value), (_, slope) in pairs]
            self.step.model.load_weights(values, strict=False)
            mx.eval(self.step.model.trainable_parameters())
        flat = tree_flatten(self.step.model.trainable_parameters())
        return losses, {name: np.array(value) for name, value in flat}

    def close(self):
        self.store.close()
        self.step.close()


def active_growth(start):
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory() - start


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_upper_weights_stay_in_memory(tmp_path, tied):
    """Untied, the embedding (1 MB) goes too: nothing above the cut uses it."""
    upper, lower = write_model(tmp_path / "model", tied)
    gc.collect()
    start = mx.get_active_memory()
    for built_here in (True, False):
        run = Run(tmp_path / "model", examples())
        assert run.reason == ""
        assert len(run.checks) == built_here
        adapters = sum(x.nbytes for _, x in tree_flatten(run.step.model.trainable_parameters()))
        left = upper + adapters + (4000 * 64 * 4 if tied else 0)
        assert lower > 2.5 * upper
        assert active_growth(start) == pytest.approx(left, abs=0.2e6)
        run.trained()
        assert active_growth(start) == pytest.approx(left, abs=0.2e6)
        run.close()
        del run


def test_weights_of_frozen_layers_are_never_read_again(tmp_path):
    """The second run has NaN in their file, and takes the very same steps."""
    write_model(tmp_path / "model", tied=False)
    first = Run(tmp_path / "model", examples())
    losses, arrays = first.trained()
    first.close()
    spoil(tmp_path / "model")
    second = Run(tmp_path / "model", examples())
    assert second.reason == "" and not second.checks
    again, same = second.trained()
    second.close()
    assert again == losses
    assert all(np.array_equal(same[name], arrays[name]) for name in arrays)
    assert any(np.abs(x).max() > 0 for name, x in arrays.items() if name.endswith("lora_b"))

    other = Run(tmp_path / "model", examples(seed=1))  # not stored yet: they must run, with NaN
    assert "on a real micro-batch" in other.reason and other.checks == []
    other.close()


def test_another_way_of_computing_is_checked_again(tmp_path):
    write_model(tmp_path / "model", tied=True)
    blocks = Plan(batch_size=4, batch_tokens=64, widths=(16, 32), recompute=1)
    for plan, kind, checks in (
        (PLAN, "lora", 1),
        (PLAN, "lora", 0),
        (blocks, "lora", 1),
        (blocks, "lora", 0),
        (PLAN, "full", 1),
        (PLAN, "full", 0),
    ):
        run = Run(tmp_path / "model", examples(), plan, kind)
        assert run.reason == "" and len(run.checks) == checks, (plan, kind)
        run.close()


def test_steps_after_the_handover_are_those_of_a_run_without_it(tmp_path):
    """Full fine-tuning of the last layer, by MLX's own loss over the whole model."""
    write_model(tmp_path / "model", tied=False)
    run = Run(tmp_path / "model", examples(), kind="full")
    model, _ = models.load_model(tmp_path / "model")
    model.freeze()
    model.layers[CUT].unfreeze()
    for micro in run.micros:
        loss, gradient = run.step.gradient(micro, 10, None, run.store.boundary(micro))

        def whole(tokens=mx.array(micro.tokens_BT), mask=mx.array(micro.mask_BT)):
            losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            return (losses * mask[:, 1:]).sum() / 10

        expected_loss, expected = nn.value_and_grad(model, whole)()
        assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
        a, b = dict(tree_flatten(gradient)), dict(tree_flatten(expected))
        assert a.keys() == b.keys() and len(a) == 9
        assert global_norm({k: a[k] - b[k] for k in b}) <= 1e-5 * global_norm(b)
    run.close()


def test_wrong_activations_are_found_and_nothing_is_freed(tmp_path, monkeypatch):
    write_model(tmp_path / "model", tied=True)
    right = Run(tmp_path / "model", examples())
    folder = right.store.folder
    right.close()
    (folder / handover.CHECKS).unlink()
    shard, noise = folder / "00000.bin", np.random.default_rng(0)
    numbers = np.fromfile(shard, "<f4")
    (numbers + 0.01 * noise.normal(size=numbers.shape).astype("<f4")).tofile(shard)
    record = files.read_json(folder / "manifest.json")
    record["shards"][0]["sha256"] = files.sha256_file(shard)
    files.write_json(folder / "manifest.json", record)
    run = Run(tmp_path / "model", examples())
    assert "gradient by" in run.reason
    assert not (folder / handover.CHECKS).exists()
    assert run.step.gradient(run.micros[0], 10)[0] > 0, "the whole model still runs"
    run.close()


def test_a_model_whose_code_reads_frozen_weights_keeps_them(tmp_path, monkeypatch):
    write_model(tmp_path / "model", tied=True)

    def refuse(self, cut):
        raise UnsupportedModel("its code reads weights of frozen layers: gate")

    monkeypatch.setattr("stages.core.layers.staged.StagedModel.free_below", refuse)
    run = Run(tmp_path / "model", examples())
    assert "reads weights of frozen layers" in run.reason
    run.close()


def test_nothing_is_stored_where_every_layer_changes(tmp_path, capsys):
    """num_layers -1 and trained embeddings: attach says cut 0."""
    model = build("llama")
    attached = attach(model, schema.Train(num_layers=-1, updates=1))
    step = Step(model, attached, PLAN)
    source = Source(step.staged, attached.cut, manifest(model), PLAN, schema.Memory(), "cpu")
    assert prepare(source, {"train": examples()}) is None
    printed = " ".join(capsys.readouterr().err.split())
    assert printed == (
        "warning: activation cache is off: no layer's output stays the same during training"
    )
    assert not (tmp_path / ".cache").exists()
    step.close()
