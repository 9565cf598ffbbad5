"""The one step: any cut and any plan give the gradient of the whole batch, by NumPy and by MLX."""

import gc
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from small_models import VOCABULARY, build

from stages.core.config import schema
from stages.core.layers import guard
from stages.core.layers.exponentials import cheap_swiglu
from stages.core.memory import attention
from stages.core.memory.plan import Plan
from stages.core.model.trainable import attach
from stages.core.tables import Examples
from stages.core.update import batching, loss, noise
from stages.core.update.loss import global_norm
from stages.core.update.step import Step, padded_targets

WHOLE = Plan(batch_size=64, batch_tokens=100_000, widths=(96,), loss_chunk=0)


def random_examples(lengths, seed=0, prompt=2):
    """Random tokens; everything after a prompt of `prompt` tokens is a target."""
    draw = np.random.default_rng(seed)
    place = np.concatenate([np.arange(n) for n in lengths])
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=draw.integers(1, VOCABULARY, sum(lengths)).astype(np.int32),
        target_mask=place >= prompt,
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def prepared(name="llama", seed=0, **train):
    """A small model with adapters whose lora_b is not zero, so that all gradients are seen."""
    model = build(name)
    attached = attach(model, schema.Train(**{"num_layers": 2, **train}))
    draw = np.random.default_rng(seed)
    shifted = tree_map(
        lambda x: x + mx.array(draw.normal(0, 0.02, x.shape), x.dtype), model.trainable_parameters()
    )
    model.update(shifted)
    mx.eval(model.parameters())
    return model, attached


def update_gradient(step, examples, ids, plan):
    """Loss and summed gradient of one update under the plan's cut."""
    micros = batching.micro_batches(examples, np.asarray(ids), plan)
    divisor = sum(micro.targets for micro in micros)
    loss, total = 0.0, None
    for micro in micros:
        part, total = step.gradient(micro, divisor, total)
        loss += part
    return loss, total


def relative(a, b):
    return global_norm(tree_map(lambda x, y: x - y, a, b)) / global_norm(b)


def plain_gradient(model, examples, ids):
    """By MLX's own cross entropy over all logits of each row alone, averaged over all targets."""
    divisor = int(examples.targets[ids].sum())

    def loss():
        total = mx.array(0.0)
        for i in ids:
            tokens, mask = examples.example(i)
            logits = model(mx.array(tokens)[None, :-1])[0]
            losses = nn.losses.cross_entropy(logits, mx.array(tokens)[1:])
            total = total + (losses * mx.array(mask)[1:]).sum()
        return total / divisor

    value, gradient = nn.value_and_grad(model, loss)()
    mx.eval(value, gradient)
    return value.item(), gradient


def numpy_losses(model, tokens, mask):
    """Cross entropy of each target in float64 NumPy, from the model's logits."""
    logits = np.array(model(mx.array(tokens)[None])[0], dtype=np.float64)[:-1]
    top = logits.max(axis=1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    losses = log_sum - logits[np.arange(len(tokens) - 1), tokens[1:]]
    return losses[mask[1:]], (logits.argmax(axis=1) == tokens[1:])[mask[1:]]


CUTS = {
    "one by one": Plan(batch_size=1, batch_tokens=96, widths=(96,), loss_chunk=0),
    "two, chunks of 16": Plan(batch_size=2, batch_tokens=192, widths=(32, 96), loss_chunk=16),
    "by padded tokens": Plan(batch_size=8, batch_tokens=128, widths=(16, 32, 64, 96)),
    "recomputed": Plan(batch_size=3, batch_tokens=300, widths=(48, 96), recompute=1),
    "every 2nd recomputed": Plan(batch_size=3, batch_tokens=300, widths=(48, 96), recompute=2),
    "attention blocks": Plan(batch_size=3, batch_tokens=300, widths=(48, 96), attention_block=16),
    "compiled": Plan(batch_size=3, batch_tokens=300, widths=(48, 96), compiled=True),
    "all of it": Plan(
        batch_size=3,
        batch_tokens=300,
        widths=(48, 96),
        recompute=1,
        attention_block=16,
        compiled=True,
        loss_chunk=32,
    ),
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_gradient_of_the_whole_batch(cut):
    model, attached = prepared()
    examples = random_examples([90, 7, 33, 12, 60, 31])
    expected_loss, expected = plain_gradient(model, examples, np.arange(6))
    step = Step(model, attached, CUTS[cut])
    loss, gradient = update_gradient(step, examples, np.arange(6), CUTS[cut])
    step.close()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative(gradient, expected) < 1e-5
    assert all(x.dtype == mx.float32 for _, x in tree_flatten(gradient))


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3_moe", "llama_4bit"])
def test_cuts_agree_for_every_kind_of_training(name, kind):
    if (name, kind) in {("llama_4bit", "full"), ("qwen3_moe", "dora")}:
        pytest.skip("mlx-lm cannot train this")
    keys = ["self_attn.q_proj", "self_attn.v_proj"] if name == "qwen3_moe" else None
    model, attached = prepared(
        name, fine_tune_type=kind, lora_parameters=schema.LoraParameters(keys=keys)
    )
    examples = random_examples([30, 7, 19, 12])
    expected_loss, expected = plain_gradient(model, examples, np.arange(4))
    plan = Plan(batch_size=2, batch_tokens=64, widths=(16, 32), recompute=2, loss_chunk=8)
    step = Step(model, attached, plan)
    loss, gradient = update_gradient(step, examples, np.arange(4), plan)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative(gradient, expected) < 1e-5


def test_g1_a_short_and_a_long_row_in_two_micro_batches_are_the_batch_of_two():
    # mlx-lm's accumulation gives each micro-batch the same weight: its update differs by 67 %.
    model, attached = prepared(num_layers=-1)
    examples = random_examples([5, 92], prompt=1)
    one = Step(model, attached, WHOLE)
    whole_loss, whole = update_gradient(one, examples, [0, 1], WHOLE)
    one.close()
    apart = CUTS["one by one"]
    two = Step(model, attached, apart)
    loss, gradient = update_gradient(two, examples, [0, 1], apart)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert relative(gradient, whole) < 1e-5
    halves = [update_gradient(two, examples, [i], apart)[1] for i in (0, 1)]
    averaged = tree_map(lambda a, b: (a + b) / 2, *halves)
    assert relative(averaged, whole) > 0.3


def test_the_loss_is_the_cross_entropy_that_numpy_gives_in_float64():
    model, attached = prepared()
    examples = random_examples([40, 9, 25])
    ids = np.arange(3)
    by_numpy = [numpy_losses(model, *examples.example(i)) for i in ids]
    expected = np.concatenate([losses for losses, _ in by_numpy])
    step = Step(model, attached, WHOLE)
    loss, _ = update_gradient(step, examples, ids, WHOLE)
    assert loss == pytest.approx(expected.mean(), rel=1e-6)


@pytest.mark.parametrize("chunk", [0, 8])
def test_target_losses_are_numpys_one_by_one(chunk):
    model, attached = prepared()
    examples = random_examples([40, 9, 25])
    plan = replace(WHOLE, loss_chunk=chunk)
    micro = batching.micro_batch(examples, np.array([1, 2, 0]), plan)
    found = Step(model, attached, plan).target_losses(micro)
    for row, i in enumerate([1, 2, 0]):
        losses, correct = numpy_losses(model, *examples.example(i))
        mine = found.row == row
        np.testing.assert_allclose(found.loss[mine], losses, rtol=2e-6)
        assert found.correct[mine].tolist() == correct.tolist()
        assert found.position[mine].tolist() == list(range(2, len(losses) + 2))


def test_a_model_with_no_way_in_is_trained_the_plain_way_and_says_so():
    model, attached = prepared("nanbeige_looped")
    examples = random_examples([30, 7, 19])
    expected_loss, expected = plain_gradient(model, examples, np.arange(3))
    plan = Plan(batch_size=2, batch_tokens=64, widths=(16, 32), recompute=1)
    step = Step(model, attached, plan)
    assert len(step.notes) == 1
    assert step.notes[0].startswith("loss at targets is off: its 4 layers are not called once")
    loss, gradient = update_gradient(step, examples, np.arange(3), plan)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative(gradient, expected) < 1e-5
    micro = batching.micro_batch(examples, np.array([0]), plan)
    expected_losses, _ = numpy_losses(model, *examples.example(0))
    np.testing.assert_allclose(step.target_losses(micro).loss, expected_losses, rtol=2e-6)


def test_the_frozen_layers_output_can_come_from_outside():
    model, attached = prepared()
    examples = random_examples([30, 19])
    step = Step(model, attached, WHOLE)
    micro = batching.micro_batch(examples, np.arange(2), WHOLE)
    with cheap_swiglu():
        boundary = step.staged.frozen(mx.array(micro.tokens_BT), attached.cut)
        mx.eval(boundary)
    loss, gradient = step.gradient(micro, micro.targets, boundary=boundary)
    whole_loss, whole = step.gradient(micro, micro.targets)
    assert attached.cut == 2
    assert loss == whole_loss
    assert relative(gradient, whole) == 0.0
    spoilt = {name: x * 1.1 for name, x in boundary.items()}
    assert relative(step.gradient(micro, micro.targets, boundary=spoilt)[1], whole) > 1e-3


@pytest.mark.parametrize(
    "plan", [WHOLE, replace(WHOLE, compiled=True), replace(WHOLE, recompute=1)]
)
def test_dropout_noise_comes_from_the_seed(plan):
    lora = schema.LoraParameters(dropout=0.3, keys=["self_attn.q_proj"])
    model, attached = prepared(lora_parameters=lora, num_layers=1)
    examples = random_examples([30, 19])
    micro = batching.micro_batch(examples, np.arange(2), plan)
    step = Step(model, attached, plan)

    def drawn(*numbers):
        noise.seed(*numbers)
        return step.gradient(micro, micro.targets)

    first, again, other = drawn(0, 5, 1), drawn(0, 5, 1), drawn(0, 5, 2)
    assert first[0] == again[0] != other[0]
    assert relative(first[1], again[1]) == 0.0
    assert relative(other[1], first[1]) > 1e-2


def test_validation_draws_no_random_number_and_drops_nothing():
    model, attached = prepared(lora_parameters=schema.LoraParameters(dropout=0.5))
    examples = random_examples([30])
    micro = batching.micro_batch(examples, np.arange(1), WHOLE)
    step = Step(model, attached, WHOLE)
    mx.random.seed(3)
    expected_draw = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    losses = step.target_losses(micro).loss
    assert mx.random.uniform(shape=(4,)).tolist() == expected_draw
    model.eval()
    np.testing.assert_allclose(losses, numpy_losses(model, *examples.example(0))[0], rtol=2e-6)


def test_check_passes_what_is_right():
    model, attached = prepared()
    plan = CUTS["all of it"]
    micro = batching.micro_batch(random_examples([50]), np.arange(1), plan)
    step = Step(model, attached, plan)
    assert step.check(micro) == []
    assert step.plan == plan
    assert step.staged is not None


def test_check_switches_off_a_wrong_head_and_nothing_else():
    model, attached = prepared()
    plan = replace(CUTS["recomputed"], attention_block=16)
    examples = random_examples([50])
    micro = batching.micro_batch(examples, np.arange(1), plan)
    step = Step(model, attached, plan)
    head = step.staged.head
    step.staged.head = lambda hidden, parameters={}: head(hidden, parameters) * 1.01
    notes = step.check(micro)
    assert len(notes) == 1
    assert notes[0].startswith("loss at targets is off: on a real micro-batch loss is off by")
    assert step.plan == plan
    expected_loss, expected = plain_gradient(model, examples, np.arange(1))
    loss, gradient = step.gradient(micro, micro.targets)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative(gradient, expected) < 1e-5


def test_check_switches_off_a_wrong_recomputation_and_nothing_else(monkeypatch):
    import stages.core.update.step as module

    def stale(layer, call, args, kwargs):
        # The loss is right and the gradient is not: what a closure over a loop variable does.
        hidden = call(layer, *args, **kwargs)
        return mx.stop_gradient(hidden) if hidden.ndim else hidden

    class Recomputing:
        def __init__(self, layers):
            self.layers = layers

        def __enter__(self):
            self.classes = [type(layer) for layer in self.layers]
            for layer, kind in zip(self.layers, self.classes, strict=True):
                body = {"__call__": lambda s, *a, _k=kind, **k: stale(s, _k.__call__, a, k)}
                layer.__class__ = type(kind.__name__, (kind,), body)

        def __exit__(self, *_):
            for layer, kind in zip(self.layers, self.classes, strict=True):
                layer.__class__ = kind

    monkeypatch.setattr(module, "recompute", stale)
    monkeypatch.setattr(module, "recomputing", Recomputing)
    model, attached = prepared()
    plan = replace(CUTS["recomputed"], attention_block=16)
    micro = batching.micro_batch(random_examples([50]), np.arange(1), plan)
    step = Step(model, attached, plan)
    notes = step.check(micro)
    assert len(notes) == 1
    found = re.match(r"recomputation is off: on a real micro-batch loss is off by (\S+),", notes[0])
    assert float(found[1]) < 1e-6  # only the gradient is wrong
    assert step.plan == replace(plan, recompute=0)
    assert step.staged is not None


def cut_off(layer, call, args, kwargs):
    """A runner whose loss is right and whose gradient is not."""
    return mx.stop_gradient(call(layer, *args, **kwargs))


def test_a_block_longer_than_the_example_is_checked_as_well(monkeypatch):
    def later_blocks_wrong(arrays, words, spans, cotangent, right=attention._backward):
        found = right(arrays, words, spans, cotangent)
        return {**found, "queries": found["queries"] * (1.1 if len(spans) > 1 else 1.0)}

    monkeypatch.setattr(attention, "_backward", later_blocks_wrong)
    model, attached = prepared()
    plan = Plan(1, 512, (64,), attention_block=512, loss_chunk=512)
    micro = batching.micro_batch(random_examples([50]), np.arange(1), plan)
    step = Step(model, attached, plan)
    assert step.check(micro)[0].startswith("attention in blocks is off: on a real micro-batch")
    assert step.plan == replace(plan, attention_block=0)


def test_pieces_of_the_loss_are_checked_though_they_are_large(monkeypatch):
    pieces = []
    chunks = loss._chunks
    monkeypatch.setattr(loss, "_chunks", lambda n, c: pieces.append(c) or chunks(n, c))
    model, attached = prepared()
    plan = Plan(1, 512, (64,), loss_chunk=512)
    micro = batching.micro_batch(random_examples([50]), np.arange(1), plan)
    assert Step(model, attached, plan).check(micro) == []
    assert max(pieces) <= micro.targets / 3


def test_dropout_comes_back_after_an_evaluation_and_after_a_check():
    model, attached = prepared(lora_parameters=schema.LoraParameters(dropout=0.5))
    micro = batching.micro_batch(random_examples([50]), np.arange(1), WHOLE)
    step = Step(model, attached, WHOLE)
    dropouts = [x for x in model.modules() if isinstance(x, nn.Dropout) and x._p_1 < 1]
    for between in (step.check, step.target_losses, lambda micro: model.eval()):
        between(micro)
        step.gradient(micro, micro.targets)
        assert all(x.training for x in dropouts)
    step.target_losses(micro)
    assert not any(x.training for x in dropouts)


@pytest.mark.parametrize("others", [{}, {"attention_block": 16, "compiled": True}])
def test_check_finds_a_fault_that_only_the_parts_of_a_model_have(monkeypatch, others):
    monkeypatch.setattr(
        "stages.core.update.step.recompute", cut_off
    )  # not in the whole model's way
    model, attached = prepared()
    plan = replace(CUTS["recomputed"], **others)
    examples = random_examples([50])
    micro = batching.micro_batch(examples, np.arange(1), plan)
    step = Step(model, attached, plan)
    expected_loss, expected = plain_gradient(model, examples, np.arange(1))
    assert relative(step.gradient(micro, micro.targets)[1], expected) > 0.1
    notes = step.check(micro)
    assert [note.split(":")[0] for note in notes] == ["recomputation is off"]
    assert step.plan == replace(plan, recompute=0)
    assert step.staged is not None
    loss, gradient = step.gradient(micro, micro.targets)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert relative(gradient, expected) < 1e-5


def test_check_switches_all_off_where_two_are_wrong_only_together(monkeypatch):
    from stages.core.memory.recompute import recompute

    model, attached = prepared()
    plan = replace(CUTS["recomputed"], attention_block=16)
    examples = random_examples([50])
    micro = batching.micro_batch(examples, np.arange(1), plan)
    step = Step(model, attached, plan)

    def runner(*given):
        return cut_off(*given) if step.plan.attention_block else recompute(*given)

    monkeypatch.setattr("stages.core.update.step.recompute", runner)
    notes = step.check(micro)
    together = "recomputation with attention in blocks is off: on a real micro-batch"
    assert [note[: len(together)] for note in notes] == [together]
    assert step.plan == replace(plan, recompute=0, attention_block=0)
    gradient = step.gradient(micro, micro.targets)[1]
    assert relative(gradient, plain_gradient(model, examples, np.arange(1))[1]) < 1e-5


def test_check_passes_a_gradient_of_zero_and_finds_what_is_not(monkeypatch):
    # A scale of 0 takes the adapters out of the model: every gradient is exactly 0.
    model, attached = prepared(lora_parameters=schema.LoraParameters(scale=0.0))
    plan = CUTS["all of it"]
    examples = random_examples([50])
    micro = batching.micro_batch(examples, np.arange(1), plan)
    assert global_norm(plain_gradient(model, examples, np.arange(1))[1]) == 0.0
    step = Step(model, attached, plan)
    assert step.check(micro) == []
    assert step.plan == plan

    def stray(layer, call, args, kwargs):  # the value is right, with a gradient from nowhere
        leak = layer.self_attn.q_proj.lora_a.sum()
        return call(layer, *args, **kwargs) + (leak - mx.stop_gradient(leak))

    monkeypatch.setattr("stages.core.update.step.recompute", stray)
    assert step.check(micro)[0].startswith("recomputation is off: on a real micro-batch loss is")
    assert step.plan == replace(plan, recompute=0)


def test_a_relative_error_of_zero_is_the_absolute_one():
    assert guard.relative(0.0, 0.0) == 0.0
    assert guard.relative(3e-6, 0.0) == 3e-6
    assert guard.relative(3.0, 4.0) == 0.75
    assert np.isnan(guard.relative(float("nan"), 0.0))


def test_a_compiled_step_drops_out_after_a_check_without_dropout():
    lora = schema.LoraParameters(dropout=0.3, keys=["self_attn.q_proj"])
    model, attached = prepared(lora_parameters=lora, num_layers=1)
    plan = replace(WHOLE, compiled=True)
    micro = batching.micro_batch(random_examples([30]), np.arange(1), plan)
    step = Step(model, attached, plan)
    assert step.check(micro) == []
    losses = []
    for number in (1, 2):
        noise.seed(0, 5, number)
        losses.append(step.gradient(micro, micro.targets)[0])
    assert losses[0] != losses[1]


def test_a_compiled_check_keeps_no_weights():
    model, attached = prepared()
    plan = replace(WHOLE, compiled=True)
    step = Step(model, attached, plan)
    step.check(batching.micro_batch(random_examples([30]), np.arange(1), plan))
    frozen = [x.nbytes for layer in model.layers[:2] for _, x in tree_flatten(layer.parameters())]
    gc.collect()
    before = mx.get_active_memory()
    step.staged.free_below(2)
    gc.collect()
    assert before - mx.get_active_memory() >= sum(frozen)


def test_a_compiled_step_follows_its_plan(monkeypatch):
    model, attached = prepared()
    examples = random_examples([50])
    plan = replace(CUTS["recomputed"], compiled=True)
    micro = batching.micro_batch(examples, np.arange(1), plan)
    step = Step(model, attached, plan)
    calls = []
    seen = lambda layer, call, args, kwargs: calls.append(layer) or call(layer, *args, **kwargs)
    monkeypatch.setattr("stages.core.update.step.recompute", seen)
    for recompute, most in ((0, 0), (1, 2), (0, 2), (2, 3)):  # of two trained layers
        step.plan = replace(plan, recompute=recompute)
        step.gradient(micro, micro.targets)
        assert len(calls) == most


def test_an_error_leaves_the_models_arrays_as_they_were():
    model, attached = prepared()
    micro = batching.micro_batch(random_examples([12]), np.arange(1), WHOLE)
    step = Step(model, attached, WHOLE)
    before = dict(tree_flatten(model.trainable_parameters()))
    broken = replace(micro, tokens_BT=micro.tokens_BT.astype(np.float32))
    with pytest.raises(Exception, match=r".+"):
        step.gradient(broken, micro.targets)
    after = dict(tree_flatten(model.trainable_parameters()))
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("count", "chunk", "room"),
    [(1, 64, 64), (64, 64, 64), (65, 64, 128), (150, 64, 192), (200, 64, 256), (300, 64, 384)]
    + [(400, 64, 512), (600, 64, 768), (5, 0, 64), (130, 0, 192)],
)
def test_compiled_target_counts_come_from_few_sizes(count, chunk, room):
    assert padded_targets(count, chunk) == room
