"""What is read is what the frozen layers give, and a step from it is the whole model's step."""

import time

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from stages.core.activations.prepare import prepare
from stages.core.config import schema
from stages.core.layers.guard import perturbed_adapters
from stages.core.memory.plan import Plan
from stages.core.model.trainable import attach
from stages.core.update import batching
from stages.core.update.batching import MicroBatch
from stages.core.update.step import Step
from tests.core.activations.made import PLAN, evaluated, examples, lora_model, source
from tests.core.small_models import build

MODELS = [  # name, cut: with plain hidden states, three streams, shared keys and values, v_first
    ("llama", 2),
    ("llama_4bit", 3),
    ("qwen3_5", 2),
    ("gemma3n", 2),
    ("gemma4_text", 4),
    ("hunyuan", 3),
    ("rwkv7", 2),
]


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)


def micros(split, plan=PLAN):
    return batching.micro_batches(split, np.arange(len(split)), plan)


def real(array, axes, lengths):
    """The entries of real tokens, one array (T, others) per row."""
    rows = np.moveaxis(array, axes, (0, 1))
    return [rows[row, :length] for row, length in enumerate(lengths)]


@pytest.mark.parametrize(("name", "cut"), MODELS)
def test_boundaries_are_those_of_the_frozen_layers(name, cut):
    model, split = lora_model(name, cut), examples()
    origin = source(model, cut)
    store = prepare(origin, {"train": split})["train"]
    axes = origin.staged.boundary_axes(cut)
    for micro in micros(split):
        expected = evaluated(origin.staged.frozen(mx.array(micro.tokens_BT), cut))
        found = evaluated(store.boundary(micro))
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            assert found[key].shape == array.shape and found[key].dtype == array.dtype
            pairs = [real(x, axes[key], split.lengths[micro.ids]) for x in (found[key], array)]
            for a, b in zip(*pairs, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    store.close()
    origin.staged.close()


@pytest.mark.parametrize(("name", "cut"), MODELS)
def test_gradients_from_stored_activations_are_the_whole_models(name, cut):
    model, split = lora_model(name, cut), examples()
    attached = attach(build(name), schema.Train(num_layers=len(model.layers) - cut, updates=1))
    assert attached.cut == cut
    step = Step(model, attached, PLAN)
    origin = source(model, cut)
    store = prepare(origin, {"train": split})["train"]
    origin.staged.close()
    with perturbed_adapters(model):
        for micro in micros(split):
            loss, gradient = step.gradient(micro, 7)
            stored_loss, stored = step.gradient(micro, 7, boundary=store.boundary(micro))
            assert stored_loss == pytest.approx(loss, rel=1e-5)
            a, b = (
                np.concatenate([np.array(x).ravel() for _, x in tree_flatten(tree)])
                for tree in (stored, gradient)
            )
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    store.close()
    step.close()


def test_bfloat16_is_stored_bit_for_bit_in_two_bytes():
    model, split = lora_model(cut=2, dtype=mx.bfloat16), examples((7, 7, 7))
    origin = source(model, 2)
    store = prepare(origin, {"train": split})["train"]
    (micro,) = batching.micro_batches(split, np.arange(3), Plan(8, 1024, (7,)))
    direct = origin.staged.frozen(mx.array(micro.tokens_BT), 2)
    found = store.boundary(micro)
    assert found["hidden"].dtype == mx.bfloat16
    assert np.array_equal(evaluated(found)["hidden"], evaluated(direct)["hidden"])
    assert (store.folder / "00000.bin").stat().st_size == 21 * 64 * 2
    store.close()
    origin.staged.close()


def test_the_file_holds_each_example_without_padding_by_length():
    """Read back by hand: examples of 3, 5 and 9 tokens lie one after the other, float32."""
    model, split = lora_model(cut=2), examples((9, 3, 5))
    origin = source(model, 2)
    store = prepare(origin, {"train": split})["train"]
    numbers = np.fromfile(store.folder / "00000.bin", "<f4").reshape(-1, 64)
    assert len(numbers) == 17
    for example, start in ((1, 0), (2, 3), (0, 8)):
        tokens, _ = split.example(example)
        hidden = evaluated(origin.staged.frozen(mx.array(tokens[None]), 2))["hidden"][0]
        np.testing.assert_allclose(numbers[start : start + len(tokens)], hidden, atol=1e-5)
    store.close()
    origin.staged.close()


def test_padding_repeats_the_last_token_and_empty_rows_the_first():
    model, split = lora_model(cut=2), examples((4, 6))
    origin = source(model, 2)
    store = prepare(origin, {"train": split})["train"]
    micro = MicroBatch(np.array([0, 1]), np.zeros((3, 8), np.int32), np.zeros((3, 8), bool), 0, 10)
    hidden = evaluated(store.boundary(micro))["hidden"]
    assert np.array_equal(hidden[0, 4:], np.repeat(hidden[0, 3:4], 4, axis=0))
    assert np.array_equal(hidden[1, 6:], np.repeat(hidden[1, 5:6], 2, axis=0))
    assert np.array_equal(hidden[2], hidden[0])
    store.close()
    origin.staged.close()


def test_what_is_expected_is_read_before_it_is_asked_for():
    model, split = lora_model(cut=2), examples()
    origin = source(model, 2)
    store = prepare(origin, {"train": split})["train"]
    order, read, original = micros(split), [], store._read
    assert len(order) == 3
    store._read = lambda ids, *shape: (read.append(ids.tolist()), original(ids, *shape))[1]
    store.expect(order)
    deadline = time.monotonic() + 5
    while len(read) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert read == [x.ids.tolist() for x in order[:2]], "two ahead, no more"
    for micro in order:
        assert store.boundary(micro)["hidden"].shape == (*micro.tokens_BT.shape, 64)
    assert read == [x.ids.tolist() for x in order], "each was read once"
    store.expect(order[:1])
    store.boundary(order[2])
    store.expect(order[1:2])
    store.boundary(order[1])
    assert [x.ids.tolist() for x in (order[0], order[2], order[1])] == read[3:]
    assert 0 <= store.waited_s < 5
    store.close()
    origin.staged.close()
