"""Recomputed layers give MLX's own loss and gradient, use less memory, and leave no trace."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from small_models import VOCABULARY, add_lora, build

from stages.core.layers.guard import perturbed_adapters
from stages.core.layers.staged import StagedModel
from stages.core.memory.recompute import chosen_layers, recompute, recomputing

KINDS = ["llama", "llama_4bit", "qwen3_moe", "qwen3_5", "gemma3_text", "gemma4_text", "gpt_oss"]
KINDS += ["hunyuan", "rwkv7", "cohere2"]


def tokens(rows=2, length=12):
    return mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (rows, length)), mx.int32)


def loss_and_gradient(model, given):
    def loss():
        return nn.losses.cross_entropy(model(given[:, :-1]), given[:, 1:], reduction="mean")

    value, gradient = nn.value_and_grad(model, loss)()
    mx.eval(value, gradient)
    return value.item(), dict(tree_flatten(gradient))


def difference(found, wanted):
    norm = lambda arrays: sum(mx.square(x).sum().item() for x in arrays) ** 0.5
    assert found.keys() == wanted.keys()
    return norm([found[k] - wanted[k] for k in wanted]) / norm(list(wanted.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_any_layer_class_gives_the_same_gradient(kind):
    model = build(kind)
    add_lora(model, 3)
    with perturbed_adapters(model):
        value, wanted = loss_and_gradient(model, tokens())
        before = [type(layer) for layer in model.layers]
        with recomputing(list(model.layers)):
            again, found = loss_and_gradient(model, tokens())
    assert [type(layer) for layer in model.layers] == before
    assert again == pytest.approx(value, rel=1e-6)
    assert difference(found, wanted) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "hunyuan", "gemma4_text"])
def test_staged_models_recompute_through_a_runner(kind):
    model = build(kind)
    add_lora(model, 3)
    given = tokens()
    weights = mx.array(np.random.default_rng(1).normal(size=64), mx.float32)

    def loss(staged):
        return (staged.hidden(given) * weights).sum()

    with perturbed_adapters(model), StagedModel(model) as staged:
        _, wanted = nn.value_and_grad(model, lambda: loss(staged))()
        mx.eval(wanted)
        for index in (1, 2, 3):
            staged.run_layer_with(index, recompute)
        _, found = nn.value_and_grad(model, lambda: loss(staged))()
    assert difference(dict(tree_flatten(found)), dict(tree_flatten(wanted))) < 1e-5


def test_works_inside_compile():
    model = build("llama")
    add_lora(model, 3)
    given = tokens()
    parameters = model.trainable_parameters()

    def loss(parameters, given):
        model.update(parameters)
        return nn.losses.cross_entropy(model(given[:, :-1]), given[:, 1:], reduction="mean")

    with perturbed_adapters(model):
        parameters = model.trainable_parameters()
        _, wanted = loss_and_gradient(model, given)
        with recomputing(list(model.layers)):
            _, found = mx.compile(mx.value_and_grad(loss))(parameters, given)
            mx.eval(found)
        model.update(parameters)
    assert difference(dict(tree_flatten(found)), wanted) < 1e-5


def test_dropout_draws_the_same_noise_twice():
    """The gradient must belong to the noise that the loss saw: here it is the noise itself."""
    layer = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64, bias=False))
    layer.train()
    x = mx.ones((4, 64))

    def loss():
        return layer(x).sum()

    for seed in range(5):
        mx.random.seed(seed)
        with recomputing([layer]):
            value, gradient = nn.value_and_grad(layer, loss)()
        # The loss is linear in the weight, so <weight, gradient> is the loss, if the noise agrees.
        weight = layer.layers[1].weight
        inner = (weight * gradient["layers"][1]["weight"]).sum()
        assert inner.item() == pytest.approx(value.item(), rel=1e-4)
    assert type(layer.layers[0]) is nn.Dropout


def test_keyword_and_integer_arguments():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = mx.random.normal((5, 8))

        def __call__(self, x, ids=None, scale=1.0, words=("a", None)):
            assert words == ("a", None)
            return x * scale + self.table[ids], ids

    layer = Layer()
    x, ids = mx.ones((3, 8)), mx.array([0, 2, 2])

    def loss():
        out, same = layer(x, ids=ids, scale=mx.array(2.0))
        assert same.dtype == mx.int32
        return out.sum()

    with recomputing([layer]):
        _, gradient = nn.value_and_grad(layer, loss)()
    rows = gradient["table"].sum(axis=1) / 8
    assert rows.tolist() == [1, 0, 2, 0, 0]


def test_less_memory():
    model = build("llama", hidden_size=128, intermediate_size=512)
    add_lora(model, 4)
    given = tokens(8, 100)

    def peak(layers):
        with recomputing(layers):
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            loss_and_gradient(model, given)
            return mx.get_peak_memory() - before

    layers = list(model.layers)
    none, half, every = peak([]), peak(layers[::2]), peak(layers)
    assert every < 0.75 * none
    assert every < half < none


def test_classes_are_put_back_after_an_error():
    model = build("llama")
    before = [type(layer) for layer in model.layers]
    with pytest.raises(RuntimeError, match="stop"), recomputing(list(model.layers)):
        raise RuntimeError("stop")
    assert [type(layer) for layer in model.layers] == before


@pytest.mark.parametrize(
    ("k", "place", "chosen"),
    [
        (0, "spread", []),
        (1, "spread", [3, 4, 5, 6, 7, 8]),
        (1, "first", [3, 4, 5, 6, 7, 8]),
        (2, "spread", [3, 5, 7]),
        (4, "spread", [3, 7]),
        (2, "first", [3, 4, 5]),
        (2, "last", [6, 7, 8]),
    ],
)
def test_chosen_layers(k, place, chosen):
    assert chosen_layers(range(3, 9), k, place) == chosen


def test_unknown_place():
    with pytest.raises(ValueError, match="middle"):
        chosen_layers(range(3), 1, "middle")
