"""Cheaper exponentials against float64 NumPy, and against mlx-lm's own functions in a model."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations, llama

from stages.core.layers import exponentials
from stages.core.memory.attention import attention_in_blocks

GATES = np.array([-3e38, -1e4, -200, -127, -88.5, -30, -3, -1e-3, 0, 1e-6, 0.7, 9, 88, 500, 3e38])


def silu64(x):
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def test_swiglu_is_right_from_the_smallest_to_the_largest_gate():
    gate, x = mx.array(GATES, mx.float32), mx.full(len(GATES), 0.75)
    found = np.array(exponentials.swiglu(gate, x), np.float64)
    with np.errstate(over="ignore"):
        expected = silu64(np.array(gate, np.float64)) * 0.75
    assert np.isfinite(found).all()
    assert found == pytest.approx(expected, rel=2e-6, abs=1e-36)


def test_the_gradient_of_swiglu_is_finite_and_right():
    gate, x = mx.array(GATES[1:-1], mx.float32), mx.full(len(GATES) - 2, -1.5)
    by_gate, by_x = mx.grad(lambda g, x: (exponentials.swiglu(g, x) * 3.0).sum(), (0, 1))(gate, x)
    g = np.array(gate, np.float64)
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-g))
    assert np.array(by_x) == pytest.approx(3 * g * s, rel=3e-6, abs=1e-30)
    assert np.array(by_gate) == pytest.approx(-4.5 * (s + g * s * (1 - s)), rel=3e-6, abs=1e-6)


def test_logsumexp_and_its_gradient_are_those_of_float64():
    rng = np.random.default_rng(7)
    x = rng.normal(0, 20, (3, 50)).astype(np.float32)
    x[1] += 1e4
    x[2, 1:] = -1e30
    value, gradient = mx.value_and_grad(lambda x: exponentials.logsumexp(x).sum())(mx.array(x))
    wide = x.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    weights = np.exp(wide - largest)
    expected = np.log(weights.sum(-1)) + largest[:, 0]
    assert np.array(exponentials.logsumexp(mx.array(x))) == pytest.approx(expected, rel=1e-6)
    assert value.item() == pytest.approx(expected.sum(), rel=1e-6)
    weights /= weights.sum(-1, keepdims=True)
    assert np.array(gradient) == pytest.approx(weights, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize(("heads", "kv", "queries", "keys"), [(6, 2, 5, 5), (4, 4, 3, 8)])
def test_attention_is_that_of_float64(mask, heads, kv, queries, keys):
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.normal(0, 4, (2, h, n, 8)).astype(np.float32)
        for h, n in ((heads, queries), (kv, keys), (kv, keys))
    )
    found = exponentials.attention(*map(mx.array, (q, k, v)), scale=0.3, mask=mask)
    wide = [np.repeat(x.astype(np.float64), heads // kv, axis=1) for x in (k, v)]
    scores = 0.3 * q.astype(np.float64) @ wide[0].swapaxes(-1, -2)
    if mask:
        later = np.arange(keys)[None] > np.arange(keys - queries, keys)[:, None]
        scores = np.where(later, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ wide[1]
    assert np.array(found) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_attention_serves_what_it_can_and_leaves_the_rest_to_mlx():
    arrays = {"queries": mx.zeros((1, 1, 2, 4))}
    assert exponentials.serves(arrays, "causal")
    assert exponentials.serves(arrays, None)
    assert not exponentials.serves(arrays, mx.zeros((2, 2)))
    assert not exponentials.serves(arrays | {"sinks": mx.zeros(1)}, None)
    assert not exponentials.serves({"queries": mx.zeros((1, 1, 2, 4), mx.bfloat16)}, None)


def test_the_gradient_through_blocks_is_that_of_mlx_whole():
    rng = np.random.default_rng(5)
    q, k, v = (mx.array(rng.normal(0, 1, (2, h, 9, 8)), mx.float32) for h in (4, 2, 2))
    weights = mx.array(rng.normal(0, 1, (2, 4, 9, 8)), mx.float32)

    def whole(q, k, v):
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.4, mask="causal")
        return (out * weights).sum()

    def blocks(q, k, v):
        out = attention_in_blocks(q, k, v, scale=0.4, mask="causal", block=4)
        return (out * weights).sum()

    for a, b in zip(mx.grad(whole, (0, 1, 2))(q, k, v), mx.grad(blocks, (0, 1, 2))(q, k, v)):
        assert np.array(b) == pytest.approx(np.array(a), rel=1e-4, abs=1e-5)


def test_models_use_it_inside_the_context_in_float32_only(monkeypatch):
    monkeypatch.setattr(exponentials, "swiglu", lambda gate, x: gate * 0 - 7)
    own, gate, x = activations.swiglu, mx.array([0.3, -60.0]), mx.array([2.0, 5.0])
    with exponentials.cheap_swiglu():
        assert llama.swiglu is activations.swiglu is not own
        found = llama.swiglu(gate, x)
        coarse = llama.swiglu(gate.astype(mx.bfloat16), x.astype(mx.bfloat16))
    assert found.tolist() == [-7, -7]
    assert coarse.tolist() == own(gate.astype(mx.bfloat16), x.astype(mx.bfloat16)).tolist()
    assert llama.swiglu is activations.swiglu is own
