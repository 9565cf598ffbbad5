"""The loss at targets against NumPy in float64 and against the loss over all logits."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from stages.core.layers.guard import RelativeErrors, check_loss, compare
from stages.core.layers.staged import StagedModel
from stages.core.update.loss import (
    count_targets,
    cross_entropy,
    gather_positions,
    gathered_loss,
    plain_loss,
    target_losses,
    target_positions,
)
from tests.core.small_models import VOCABULARY, add_lora, build

B, T, D, V = 3, 9, 8, 21
NOISE = np.random.default_rng(3)
TOKENS_BT = NOISE.integers(0, V, (B, T)).astype(np.int32)
MASK_BT = NOISE.random((B, T)) < 0.6
MASK_BT[:, 0] = False
HIDDEN_BTD = NOISE.normal(size=(B, T, D)).astype(np.float32)
WEIGHT_VD = NOISE.normal(size=(V, D)).astype(np.float32)
DIVISOR = 40.0


def head(hidden_CD, parameters):
    """A head with a soft cap, as Gemma 2 has: its gradient is not softmax minus one-hot."""
    weight_VD = parameters.get("weight", mx.array(WEIGHT_VD))
    logits = hidden_CD @ weight_VD.T.astype(hidden_CD.dtype)
    return 3.0 * mx.tanh(logits / 3.0)


def gathered(length):
    return [mx.array(x) for x in target_positions(TOKENS_BT, MASK_BT, length)]


def reference(hidden_BTD=HIDDEN_BTD, weight_VD=WEIGHT_VD):
    """Loss per target, in row order, and the same as one sum, by NumPy in float64."""
    logits = 3.0 * np.tanh(hidden_BTD.astype(np.float64) @ weight_VD.T.astype(np.float64) / 3.0)
    losses = []
    for b, i in zip(*np.nonzero(MASK_BT), strict=True):
        z = logits[b, i - 1]
        losses.append(np.log(np.exp(z).sum()) - z[TOKENS_BT[b, i]])
    return np.array(losses)


def numeric_gradient(values, loss, step=1e-6):
    gradient = np.zeros(values.shape)
    for index in np.ndindex(*values.shape):
        up, down = values.astype(np.float64), values.astype(np.float64)
        up[index] += step
        down[index] -= step
        gradient[index] = (loss(up) - loss(down)) / (2 * step)
    return gradient


def test_cross_entropy_equals_float64():
    logits = NOISE.normal(0, 20, (50, 300)).astype(np.float32)
    labels = NOISE.integers(0, 300, 50)
    exact = logits.astype(np.float64)
    exact = np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1)) + exact.max(1)
    exact -= logits[np.arange(50), labels]
    result = cross_entropy(mx.array(logits), mx.array(labels))
    np.testing.assert_allclose(np.array(result), exact, rtol=1e-5, atol=1e-5)
    half = mx.array(logits).astype(mx.bfloat16)
    assert cross_entropy(half, mx.array(labels)).dtype == mx.float32


def test_target_positions_by_hand():
    tokens = np.array([[5, 6, 7, 8], [1, 2, 3, 0]], np.int32)
    mask = np.array([[False, False, True, True], [False, True, False, False]])
    positions, labels, weights = target_positions(tokens, mask, 5)
    assert positions.tolist() == [1, 2, 4, 4, 4]
    assert labels.tolist() == [7, 8, 2, 2, 2]
    assert weights.tolist() == [1, 1, 1, 0, 0]
    assert (positions.dtype, labels.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
    assert count_targets(mask) == 3


def test_target_positions_without_targets():
    positions, labels, weights = target_positions(TOKENS_BT, np.zeros_like(MASK_BT), 2)
    assert (positions.tolist(), labels.tolist(), weights.tolist()) == ([0, 0], [0, 0], [0, 0])


def test_target_positions_refuse_what_would_lose_a_target():
    with pytest.raises(ValueError, match="3 targets, but room for 2"):
        target_positions(TOKENS_BT, np.eye(B, T, 1, dtype=bool), 2)
    with pytest.raises(ValueError, match="row 1: token 0 is a target"):
        target_positions(TOKENS_BT, np.eye(B, T, -1, dtype=bool), 9)


def test_plain_loss_equals_float64():
    logits = head(mx.array(HIDDEN_BTD), {})
    loss = plain_loss(logits, mx.array(TOKENS_BT), mx.array(MASK_BT), DIVISOR)
    assert loss.item() == pytest.approx(reference().sum() / DIVISOR, rel=1e-6)


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
def test_gathered_loss_and_its_gradients_equal_float64(chunk):
    """Also through a factor above it, and for the head's own weights."""
    targets = int(MASK_BT.sum())

    def loss(hidden, weight, *lists):
        value = gathered_loss(
            head, hidden, *lists, divisor=DIVISOR, chunk=chunk, head_parameters={"weight": weight}
        )
        return 3.0 * value

    value, (hidden, weight) = mx.value_and_grad(loss, argnums=[0, 1])(
        mx.array(HIDDEN_BTD), mx.array(WEIGHT_VD), *gathered(targets + 3)
    )
    assert value.item() == pytest.approx(3 * reference().sum() / DIVISOR, rel=1e-6)
    exact = numeric_gradient(HIDDEN_BTD, lambda x: 3 * reference(x).sum() / DIVISOR)
    np.testing.assert_allclose(np.array(hidden), exact, atol=1e-6)
    exact = numeric_gradient(WEIGHT_VD, lambda x: 3 * reference(HIDDEN_BTD, x).sum() / DIVISOR)
    np.testing.assert_allclose(np.array(weight), exact, atol=1e-6)


def test_micro_batches_add_up_to_the_whole_batch():
    whole = mx.grad(lambda h: gathered_loss(head, h, *gathered(30), divisor=DIVISOR, chunk=4))
    total = np.array(whole(mx.array(HIDDEN_BTD)))
    for row in range(B):
        part = [
            mx.array(x)
            for x in target_positions(TOKENS_BT[row : row + 1], MASK_BT[row : row + 1], 12)
        ]
        gradient = mx.grad(
            lambda h, part=part: gathered_loss(head, h, *part, divisor=DIVISOR, chunk=5)
        )(mx.array(HIDDEN_BTD[row : row + 1]))
        np.testing.assert_allclose(np.array(gradient)[0], total[row], atol=1e-7)


def test_a_batch_without_targets_has_loss_and_gradient_zero():
    lists = [mx.array(x) for x in target_positions(TOKENS_BT, np.zeros_like(MASK_BT), 4)]
    value, gradient = mx.value_and_grad(
        lambda h: gathered_loss(head, h, *lists, divisor=DIVISOR, chunk=2)
    )(mx.array(HIDDEN_BTD))
    assert value.item() == 0.0
    assert not mx.any(gradient).item()


def test_half_precision_keeps_its_dtype_and_sums_in_float32():
    hidden = mx.array(HIDDEN_BTD).astype(mx.bfloat16)
    weight = mx.array(WEIGHT_VD).astype(mx.bfloat16)

    def loss(hidden, weight):
        return gathered_loss(
            head,
            hidden,
            *gathered(30),
            divisor=DIVISOR,
            chunk=1,
            head_parameters={"weight": weight},
        )

    value, gradients = mx.value_and_grad(loss, argnums=[0, 1])(hidden, weight)
    assert value.dtype == mx.float32
    assert [g.dtype for g in gradients] == [mx.bfloat16] * 2
    assert value.item() == pytest.approx(reference().sum() / DIVISOR, rel=2e-2)


def test_target_losses_and_hits_equal_float64():
    positions, labels, weights = gathered(30)
    losses, correct = target_losses(head, mx.array(HIDDEN_BTD), positions, labels, 4)
    real = np.array(weights) > 0
    np.testing.assert_allclose(np.array(losses)[real], reference(), rtol=1e-5)
    predicted = (HIDDEN_BTD @ WEIGHT_VD.T).argmax(-1)
    row, column = np.nonzero(MASK_BT)
    assert (
        np.array(correct)[real].tolist()
        == (predicted[row, column - 1] == TOKENS_BT[row, column]).tolist()
    )


def test_gathering_counts_axes_from_the_end():
    """gemma3n has four streams: (S, B, T, D)."""
    streams = NOISE.normal(size=(4, B, T, D)).astype(np.float32)
    result = gather_positions(mx.array(streams), mx.array([0, T + 2, 2 * T + 1]))
    expected = np.stack([streams[:, 0, 0], streams[:, 1, 2], streams[:, 2, 1]], axis=1)
    assert np.array_equal(np.array(result), expected)


def model_batch():
    tokens = NOISE.integers(0, VOCABULARY, (2, 10)).astype(np.int32)
    mask = NOISE.random((2, 10)) < 0.5
    mask[:, 0] = False
    return tokens, mask


@pytest.mark.parametrize("name", ["llama", "llama_untied", "gemma2", "gemma3n", "cohere2"])
def test_trained_heads_get_their_gradient(name):
    """Full fine-tuning: tied embedding, head and final norm are trained too."""
    with StagedModel(build(name)) as staged:
        assert staged.head_parameters()
        for chunk in (3, None):
            errors = check_loss(staged, *model_batch(), chunk)
            assert errors.loss <= 1e-5 and errors.gradient <= 1e-5


def test_an_adapter_on_the_head_gets_its_gradient():
    model = build("llama_untied")
    add_lora(model, 1, keys=["lm_head", "self_attn.q_proj"])
    tokens, mask = model_batch()
    with StagedModel(model) as staged:
        errors = check_loss(staged, tokens, mask, 3)
        assert errors.loss <= 1e-5 and errors.gradient <= 1e-5

        def forgotten():
            lists = [mx.array(x) for x in target_positions(tokens, mask, 20)]
            return gathered_loss(
                staged.head, staged.hidden(mx.array(tokens)), *lists, divisor=9.0, chunk=3
            )

        def plain():
            return plain_loss(model(mx.array(tokens)), mx.array(tokens), mx.array(mask), 9.0)

        assert compare(model, forgotten, plain).gradient > 0.1, "the guard tells when left out"


def test_compiled_training_of_a_tied_head():
    model = build("llama")
    tokens, mask = model_batch()
    lists = [mx.array(x) for x in target_positions(tokens, mask, 20)]

    def loss(tokens, lists, divisor):
        hidden = staged.hidden(tokens)
        return gathered_loss(
            staged.head,
            hidden,
            *lists,
            divisor=divisor,
            chunk=4,
            head_parameters=staged.head_parameters(),
        )

    state = [model.state]
    with StagedModel(model) as staged:
        step = mx.compile(nn.value_and_grad(model, loss), inputs=state, outputs=state)
        value, gradient = step(mx.array(tokens), lists, mx.array(9.0))
        mx.eval(value, gradient)
    plain = nn.value_and_grad(
        model, lambda: plain_loss(model(mx.array(tokens)), mx.array(tokens), mx.array(mask), 9.0)
    )
    exact_value, exact = plain()
    assert value.item() == pytest.approx(exact_value.item(), rel=1e-5)
    exact = dict(tree_flatten(exact))
    for key, ours in tree_flatten(gradient):
        np.testing.assert_allclose(np.array(ours), np.array(exact[key]), rtol=1e-3, atol=1e-6)


def test_compare_measures_relative_norms():
    """By hand: losses 9 and 10; gradients (3, 4) of norm 5 and (3, 4.5)."""
    model = nn.Linear(1, 2, bias=False)
    model.weight = mx.array([[1.0], [2.0]])
    to = lambda slope, value: (
        lambda: (
            value
            + ((model.weight - mx.stop_gradient(model.weight)) * mx.array(slope)[:, None]).sum()
        )
    )
    errors = compare(model, to([3.0, 4.5], 9.0), to([3.0, 4.0], 10.0))
    assert errors == RelativeErrors(pytest.approx(0.1), pytest.approx(0.1))


def test_chunks_are_computed_one_after_another():
    """512 targets of 8000 tokens: 16.4 MB a copy of the logits; in chunks of 32 a sixteenth."""
    noise = np.random.default_rng(0)
    hidden = mx.array(noise.normal(size=(2, 256, 32)).astype(np.float32))
    weight = mx.array(noise.normal(size=(8000, 32)).astype(np.float32))
    lists = (mx.arange(512), mx.arange(512), mx.ones(512))
    big_head = lambda h, _: h @ weight.T
    mx.eval(hidden, weight, lists)

    def peak(run):
        resting = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(run())
        return (mx.get_peak_memory() - resting) / 1e6

    step = lambda chunk: mx.value_and_grad(
        lambda h: gathered_loss(big_head, h, *lists, divisor=512.0, chunk=chunk)
    )(hidden)
    losses = lambda chunk: target_losses(big_head, hidden, *lists[:2], chunk)
    assert peak(lambda: step(None)) > 32
    assert peak(lambda: step(32)) < 16
    assert peak(lambda: losses(None)) > 16
    assert peak(lambda: losses(32)) < 10
