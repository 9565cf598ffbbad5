"""Optimizers by mlx-lm's names, clipping by the global norm, one step by hand."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from stages.core.config import schema
from stages.core.errors import UserError
from stages.train import optimizer


class Two(nn.Module):
    def __init__(self, dtype=mx.float32):
        super().__init__()
        self.a = mx.array([[1.0, -2.0], [0.5, 4.0]], dtype)
        self.b = mx.array([3.0, 1.0], dtype)


GRADIENT = {"a": mx.array([[0.3, -0.1], [0.2, 0.6]]), "b": mx.array([-0.4, 0.5])}


def numbers(model):
    return {name: np.array(x.astype(mx.float32)) for name, x in tree_flatten(model.parameters())}


def test_adamw_steps_by_hand():
    config = {"adamw": {"weight_decay": 0.1, "betas": [0.8, 0.9]}}
    train = schema.Train(optimizer="adamw", optimizer_config=config)
    model = Two()
    made = optimizer.build(train, model)
    expected, m, v = {k: x.astype(np.float64) for k, x in numbers(model).items()}, {}, {}
    for rate in (0.01, 0.02):
        assert optimizer.apply(model, made, GRADIENT, rate)
        for name, array in GRADIENT.items():
            g = np.array(array, dtype=np.float64)
            m[name] = 0.8 * m.get(name, 0) + 0.2 * g
            v[name] = 0.9 * v.get(name, 0) + 0.1 * g**2
            decayed = expected[name] * (1 - rate * 0.1)
            expected[name] = decayed - rate * m[name] / (np.sqrt(v[name]) + 1e-8)
    for name, found in numbers(model).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon", "adafactor"])
def test_every_optimizer_is_mlx_lms_own(name):
    kinds = {
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "sgd": optim.SGD,
        "muon": optim.Muon,
        "adafactor": optim.Adafactor,
    }
    train = schema.Train(optimizer=name, learning_rate=0.01)
    model, reference = Two(), Two()
    made, plain = optimizer.build(train, model), kinds[name](learning_rate=0.01)
    for _ in range(3):
        optimizer.apply(model, made, GRADIENT, 0.01)
        plain.update(reference, GRADIENT)
    for key, found in numbers(model).items():
        assert (found == numbers(reference)[key]).all()
        assert (found != numbers(Two())[key]).all()


def test_bfloat16_parameters_stay_bfloat16():
    model = Two(mx.bfloat16)
    made = optimizer.build(schema.Train(), model)
    optimizer.apply(model, made, GRADIENT, 0.1)
    assert model.a.dtype == model.b.dtype == mx.bfloat16
    assert {x.dtype for _, x in tree_flatten(made.state) if x.size > 1} == {mx.bfloat16}


def test_clipping_scales_all_arrays_by_one_factor():
    norm = np.sqrt(sum((np.array(g, np.float64) ** 2).sum() for g in GRADIENT.values()))
    limited, found = optimizer.clipped(GRADIENT, 0.5)
    assert found == pytest.approx(norm, rel=1e-6)
    for name, g in GRADIENT.items():
        expected = np.array(g) * 0.5 / (norm + 1e-6)
        np.testing.assert_allclose(np.array(limited[name]), expected, rtol=1e-6)


@pytest.mark.parametrize("limit", [None, 2.0])
def test_a_small_gradient_is_not_scaled_up(limit):
    limited, norm = optimizer.clipped(GRADIENT, limit)
    assert norm == pytest.approx(0.9539392, rel=1e-6)
    assert all((limited[name] == GRADIENT[name]).all().item() for name in GRADIENT)


def test_an_infinite_weight_is_seen():
    model = Two()
    made = optimizer.build(schema.Train(optimizer="sgd"), model)
    assert optimizer.apply(model, made, GRADIENT, 1.0)
    assert not optimizer.apply(model, made, {**GRADIENT, "b": mx.array([3e38, 0.0])}, 1e10)


def test_a_state_comes_back_exactly():
    model, train = Two(), schema.Train(optimizer="adamw")
    made = optimizer.build(train, model)
    optimizer.apply(model, made, GRADIENT, 0.1)
    other, again = Two(), optimizer.build(train, Two())
    other.update(model.parameters())
    optimizer.restore(again, optimizer.flat_state(made))
    for target, its in ((model, made), (other, again)):
        optimizer.apply(target, its, GRADIENT, 0.1)
    assert all((numbers(model)[name] == numbers(other)[name]).all() for name in ("a", "b"))
    assert again.step.item() == 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"adamw": {"weigth_decay": 0.1}}, "weigth_decay"),
        ({"admw": {}}, "nearest: adamw"),
        ({"adamw": {"betas": [0.9, 1.5]}}, "beta2 should be in"),
        ({"adamw": {"learning_rate": 1.0}}, "learning_rate"),
    ],
)
def test_wrong_settings_are_named(config, said):
    with pytest.raises(UserError) as caught:
        optimizer.build(schema.Train(optimizer_config=config), Two())
    assert said in str(caught.value)
    assert "train.optimizer_config" in str(caught.value)


def test_adafactor_that_ignores_the_rate_is_known():
    assert optimizer.ignores_rate(schema.Train(optimizer="adafactor"))
    config = {"adafactor": {"relative_step": False}}
    assert not optimizer.ignores_rate(schema.Train(optimizer="adafactor", optimizer_config=config))
    assert not optimizer.ignores_rate(schema.Train(optimizer="adam"))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon", "adafactor"])
def test_a_compiled_step_is_the_plain_one(name, monkeypatch):
    """As a GPU takes it; MLX's own update, one array after the other, is the reference."""
    ways = {}
    for compiled in (False, True):
        monkeypatch.setattr(optimizer, "_compiles", lambda model, on=compiled: on)
        mx.random.seed(0)
        model = nn.Linear(6, 5)
        state = optimizer.build(schema.Train(optimizer=name), model)
        for rate in (1e-2, 3e-3, 1e-3):
            gradient = {k: mx.sin(7 * x + rate) for k, x in model.parameters().items()}
            assert optimizer.apply(model, state, gradient, rate)
        ways[compiled] = {**model.parameters(), **optimizer.flat_state(state)}
    assert ways[True].keys() == ways[False].keys()
    for key, plain in ways[False].items():
        np.testing.assert_allclose(np.array(ways[True][key]), np.array(plain), 2e-6, 1e-7)
    assert ways[True]["learning_rate"].item() == pytest.approx(1e-3)


def test_a_compiled_step_says_when_weights_are_not_finite(monkeypatch):
    monkeypatch.setattr(optimizer, "_compiles", lambda model: True)
    model = nn.Linear(2, 2, bias=False)
    state = optimizer.build(schema.Train(optimizer="sgd"), model)
    assert optimizer.apply(model, state, {"weight": mx.ones((2, 2))}, 1.0)
    assert not optimizer.apply(model, state, {"weight": mx.full((2, 2), mx.inf)}, 1.0)
