"""What parts of an update cost at least, by hand; and that timing them changes nothing."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from benchmarks import operations, parts, shapes, sides, subject, ways
from benchmarks.operations import Cost, Rates
from benchmarks.spec import OURS, Spec
from stages.core.config import schema
from stages.core.layers.guard import perturbed_adapters
from stages.core.layers.staged import StagedModel
from stages.core.machine import device
from stages.core.model.trainable import attach
from stages.core.update.step import Step

NANO = "qwen3-nano"
SPEC = Spec(OURS, "examples.parquet", 24, 2, 2, 2, shape=NANO, dtype="float32", kind="cpu")


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    from benchmarks import choice

    monkeypatch.chdir(tmp_path)
    choice.write(tmp_path / "examples.parquet", choice.random([(4, 24), (9, 24)], 512))
    chosen = device.prepare("cpu")
    return subject.load(SPEC, chosen, subject.settings_of(SPEC), lazy=False)


def test_operations_of_a_layer_by_hand():
    """qwen3-nano: width 64, inner 160, 4 heads of 16 with 2 for keys and values."""
    model = shapes.build(NANO, "float32")
    model.freeze()
    matrices = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160
    rows, width = 3, 10
    forward = operations.forward(model.layers[0], rows, width)
    assert forward.operations == 2 * matrices * 30 + 2 * 3 * 10**2 * 64
    through = 64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 160)
    assert forward.bytes == 4 * matrices + 30 * 4 * through
    backward = operations.backward(model.layers[0], rows, width)
    assert backward.operations == 2 * matrices * 30 + 4 * 3 * 10**2 * 64
    model.layers[1].unfreeze()
    whole = operations.backward(model.layers[1], rows, width)
    assert whole.operations == 4 * matrices * 30 + 4 * 3 * 10**2 * 64


def test_operations_of_adapters_and_of_quantized_layers():
    lora = schema.LoraParameters(rank=8)
    model = shapes.build(NANO, "float32", bits=4)
    packed = operations.forward(model.layers[3], 1, 10).operations
    assert packed == operations.forward(shapes.build(NANO, "float32").layers[3], 1, 10).operations
    attach(model, schema.Train(num_layers=1, lora_parameters=lora))
    ends = 64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 160)
    assert operations.forward(model.layers[3], 1, 10).operations == packed + 2 * 8 * ends * 10
    more = operations.backward(model.layers[3], 1, 10).operations
    assert more == packed + 2 * 10**2 * 64 + 4 * 8 * ends * 10


def test_a_floor_is_the_dearer_of_operations_and_bytes():
    rates = Rates(operations_s=100.0, bytes_s=10.0, product="")
    assert rates.floor(Cost(200.0, 10.0)) == 2.0
    assert rates.floor(Cost(200.0, 30.0) + Cost(0.0, 10.0)) == 4.0


def test_a_quantized_shape_is_as_large_as_its_manifest_says():
    model = shapes.build(NANO, "bfloat16", bits=4)
    arrays = [x for _, x in tree_flatten(model.parameters())]
    assert any(x.dtype == mx.uint32 for x in arrays)
    facts = shapes.manifest(NANO, "bfloat16", 4)
    assert facts.bytes == sum(x.nbytes for x in arrays)
    assert facts.quantization == {"bits": 4, "group_size": 64}
    plain = shapes.manifest(NANO, "bfloat16")
    assert facts.parameters == plain.parameters
    assert facts.files != plain.files  # else one would read the other's stored activations
    # 4 bits and two bfloat16 for 64 numbers: 4.5 bits a number.
    big = shapes.manifest("qwen3-4b", "bfloat16", 4)
    assert big.bytes / big.parameters == pytest.approx(4.5 / 8, rel=1e-3)


def test_both_sides_have_their_losses_on_a_quantized_shape(loaded, tmp_path):
    from dataclasses import replace

    from benchmarks import child, turns
    from benchmarks.spec import THEIRS

    ours = replace(SPEC, bits=4)
    specs = {"mlx-lm": replace(ours, side=THEIRS), "ours": ours,
             "cached": replace(ours, plan={"activation_cache": True})}  # fmt: skip
    report = turns.take("packed", specs, 1, child.measured, tmp_path)
    assert [x["agrees"] for x in report["variants"].values()] == [True] * 3
    assert {x["trained_layers"] for x in report["variants"].values()} == {2}


def test_timed_parts_give_the_models_own_numbers_and_leave_it_as_it_was(loaded):
    examples = loaded.examples
    plan = subject.equal_rows(SPEC, loaded.manifest, examples)
    micro = ways.first(examples, 2, plan)
    before = dict(tree_flatten(loaded.model.trainable_parameters()))
    tokens_BT = mx.array(micro.tokens_BT)
    with StagedModel(loaded.model) as staged:
        expected = np.array(staged.hidden(tokens_BT))
        around = parts.functions(plan, staged, loaded.attached.cut)
        timer = parts.Parts(loaded.model, staged, loaded.attached.cut, False, around)
        hidden = timer.layers(tokens_BT, timer.frozen(tokens_BT))
        parts.of_ours(timer, [(micro, {})], plan)
    np.testing.assert_allclose(np.array(hidden), expected, rtol=2e-5, atol=2e-5)
    after = dict(tree_flatten(loaded.model.trainable_parameters()))
    assert all(after[name] is before[name] for name in before)
    assert all(seconds > 0 for seconds in timer.seconds.values())
    assert timer.built > 0


def test_costs_of_an_update_add_up_over_micro_batches(loaded):
    costs = sides.costs(loaded, [(2, 24), (1, 8)], [20, 5], frozen=True)
    first, second = (
        sides.costs(loaded, [shape], [count], frozen=True)
        for shape, count in (((2, 24), 20), ((1, 8), 5))
    )
    for part in (parts.FROZEN, parts.FORWARD, parts.BACKWARD, parts.HEAD):
        assert costs[part] == first[part] + second[part]
        assert costs[part].operations > 0
    assert costs[parts.HEAD].operations == 4 * 512 * 64 * 25
    assert sides.costs(loaded, [(2, 24)], [20], frozen=False)[parts.FROZEN] == Cost()


def test_every_way_has_the_gradient_of_keeping_all(loaded):
    plan = subject.equal_rows(SPEC, loaded.manifest, loaded.examples)
    step = Step(loaded.model, loaded.attached, plan)
    with perturbed_adapters(loaded.model):
        found = list(ways.cells(step, ways.first(loaded.examples, 2, plan), 1, warm=False))
    assert [cell["way"] for cell in found] == list(ways.WAYS)
    assert all(cell["agrees"] for cell in found)
    assert max(cell["gradient_error"] for cell in found) <= 1e-5
    assert {(cell["rows"], cell["length"]) for cell in found} == {(2, 24)}


def test_a_wrong_gradient_is_seen(loaded, monkeypatch):
    plan = subject.equal_rows(SPEC, loaded.manifest, loaded.examples)
    step = Step(loaded.model, loaded.attached, plan)
    right = step.gradient

    def wrong(*given):
        loss, gradient = right(*given)
        scale = 1.01 if step.plan.recompute else 1.0
        return loss, {"x": mx.concatenate([x.flatten() * scale for _, x in tree_flatten(gradient)])}

    monkeypatch.setattr(step, "gradient", wrong)
    with perturbed_adapters(loaded.model):
        found = list(ways.cells(step, ways.first(loaded.examples, 2, plan), 1, warm=False))
    assert [cell["agrees"] for cell in found] == [True] + [False] * 5
    assert found[1]["gradient_error"] == pytest.approx(0.01, rel=1e-3)
