import mlx.core as mx
import numpy as np
import pytest

from stages.core.errors import RunFailed, UserError
from stages.core.layers.staged import StagedModel
from stages.evaluate.losses import open_pair
from tests.core.small_models import build
from tests.evaluate.both import (
    PLAN,
    float64,
    from_logits,
    fused,
    micro,
    numpy_llama,
    separate,
    write_adapters,
)


def opened(tmp_path, name="llama", plan=PLAN, **kwargs):
    folder = write_adapters(tmp_path / "adapters", name, **kwargs)
    return folder, open_pair(build(name), folder, plan)


def test_losses_and_hits_against_float64_numpy(tmp_path):
    folder, pair = opened(tmp_path)
    batch = micro()
    found = pair.score(batch)
    row, position = np.nonzero(batch.mask_BT)
    assert found.example.tolist() == row.tolist()
    assert found.position.tolist() == position.tolist()
    weights = fused(build("llama"), folder)
    tuned_loss, tuned_hit = from_logits(numpy_llama(weights, batch.tokens_BT), batch)
    base_loss, base_hit = from_logits(numpy_llama(float64(build("llama")), batch.tokens_BT), batch)
    np.testing.assert_allclose(found.base.loss, base_loss, rtol=2e-5)
    np.testing.assert_allclose(found.tuned.loss, tuned_loss, rtol=2e-5)
    assert found.base.correct.tolist() == base_hit.tolist()
    assert found.tuned.correct.tolist() == tuned_hit.tolist()
    assert np.abs(base_loss - tuned_loss).max() > 0.01
    pair.close()


@pytest.mark.parametrize(
    ("name", "kind", "layers", "keys"),
    [
        ("llama", "lora", 2, None),
        ("llama", "lora", -1, None),
        ("llama", "dora", 2, None),
        ("llama", "full", 1, None),
        ("llama_untied", "lora", 2, ["lm_head"]),
        ("llama_4bit", "lora", 2, None),
        ("gemma3_text", "lora", 3, ["self_attn.q_proj"]),
        ("gemma4_text", "lora", 3, ["self_attn.q_proj"]),
        ("qwen3_moe", "lora", 2, ["self_attn.q_proj"]),
        ("nanbeige_looped", "lora", 2, ["self_attn.q_proj"]),
    ],
)
def test_equal_to_two_separate_passes(tmp_path, name, kind, layers, keys):
    """A plain base model and a second one with the adapters loaded by mlx-lm, all logits."""
    folder, pair = opened(tmp_path, name, kind=kind, layers=layers, keys=keys)
    batch = micro()
    assert pair.check(batch) == ""
    assert pair.shared == (layers != -1 and name != "nanbeige_looped")
    found = pair.score(batch)
    pair.close()
    (base, _), (tuned, _) = separate(name, folder, batch)
    np.testing.assert_allclose(found.base.loss, base, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.tuned.loss, tuned, rtol=1e-5, atol=1e-5)
    assert np.abs(base - tuned).max() > 1e-3


def test_frozen_layers_run_once_for_both(tmp_path):
    """4 layers, 2 of them trained: 2 + 2 + 2 layer runs, not 8."""
    _, pair = opened(tmp_path)
    pair.score(micro())  # the first use also looks at what layers pass on
    ran = []

    def watched(index):
        def run(layer, call, args, kwargs):
            ran.append(index)
            return call(layer, *args, **kwargs)

        return run

    for index in range(4):
        pair.step.staged.run_layer_with(index, watched(index))
    pair.score(micro())
    pair.close()
    assert sorted(ran) == [0, 1, 2, 2, 3, 3]


def test_a_boundary_that_is_wrong_is_found_and_not_used(tmp_path, monkeypatch):
    folder, pair = opened(tmp_path)
    right = StagedModel.frozen

    def wrong(self, tokens, cut):
        return {name: 1.5 * value for name, value in right(self, tokens, cut).items()}

    monkeypatch.setattr(StagedModel, "frozen", wrong)
    batch = micro()
    assert "the loss would be off" in pair.check(batch)
    found = pair.score(batch)
    (base, _), (tuned, _) = separate("llama", folder, batch)
    np.testing.assert_allclose(found.base.loss, base, rtol=1e-5)
    np.testing.assert_allclose(found.tuned.loss, tuned, rtol=1e-5)


def test_tuned_values_are_back_after_the_base_block(tmp_path):
    _, pair = opened(tmp_path, kind="full", layers=1)
    tuned = pair.model.layers[3].mlp.up_proj.weight
    original = build("llama").layers[3].mlp.up_proj.weight
    with pair.as_base():
        assert mx.array_equal(pair.model.layers[3].mlp.up_proj.weight, original)
    assert mx.array_equal(pair.model.layers[3].mlp.up_proj.weight, tuned)
    assert not mx.array_equal(tuned, original)


def test_a_loss_that_is_not_finite_names_the_example(tmp_path):
    _, pair = opened(tmp_path)
    up = pair.model.layers[3].mlp.up_proj
    up.lora_b = mx.full(up.lora_b.shape, float("nan"))
    with pytest.raises(RunFailed, match="tuned model's loss is not finite") as error:
        pair.score(micro(first_id=40))
    assert error.value.where == "example 40, 41, 42"


def test_adapters_of_another_model_are_refused(tmp_path):
    folder = write_adapters(tmp_path / "adapters", "llama")
    with pytest.raises(UserError, match="do not fit"):
        open_pair(build("llama", intermediate_size=32), folder, PLAN)
