"""The exact update in this process: what is trained, counted, validated, kept, refused."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from jobs import column, make, random_examples
from mlx import nn
from mlx.utils import tree_flatten
from small_models import build

from stages.core.config import schema
from stages.core.entry import Stopped
from stages.core.memory.plan import Plan
from stages.core.update import batching
from stages.train import loop, optimizer, outputs

LENGTHS = [20, 31, 9, 60, 12, 44, 33, 25, 18, 50]


def weights(job):
    flat = tree_flatten(job.step.model.trainable_parameters())
    return {name: np.array(x.astype(mx.float32)) for name, x in flat}


def distance(a, b, start):
    """‖a − b‖ over ‖b − start‖, over all arrays together."""
    difference = sum(((a[name] - b[name]) ** 2).sum() for name in b)
    change = sum(((b[name] - start[name]) ** 2).sum() for name in b)
    return math.sqrt(difference / change)


def test_g5_all_rows_are_trained_every_epoch(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), epochs=2.0)
    seen = []
    step = job.step.gradient
    job.step.gradient = lambda micro, *rest: (seen.extend(micro.ids.tolist()), step(micro, *rest))[
        1
    ]
    loop.train(job, state)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert (state.update, state.epoch, state.position) == (6, 2, 0)
    assert column(state, "epoch") == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]


def test_g2_fewer_rows_than_accumulation_asks_for_are_still_an_update(tmp_path):
    plan = Plan(batch_size=1, batch_tokens=64, widths=(64,))
    job, state = make(tmp_path, random_examples([20, 9, 33]), plan=plan, updates=1)
    before = weights(job)
    loop.train(job, state)
    assert state.update == 1
    assert any((weights(job)[name] != before[name]).any() for name in before)


def test_history_counts_real_tokens_and_targets(tmp_path):
    examples = random_examples(LENGTHS, prompt=3)
    job, state = make(tmp_path, examples, epochs=1.0, effective_batch_size=10)
    loop.train(job, state)
    assert column(state, "tokens") == [sum(LENGTHS)]
    assert column(state, "targets") == [sum(LENGTHS) - 3 * len(LENGTHS)]
    assert column(state, "learning_rate") == [1e-3]


def test_one_update_by_another_road(tmp_path):
    # The whole batch as single rows through MLX's own cross entropy, clipped by mlx.optimizers.
    examples = random_examples([30, 7, 19, 12])
    job, state = make(tmp_path, examples, updates=1, clip_norm=0.1, num_layers=-1)
    model = build("llama")
    reference, _ = make(tmp_path, examples, model=model, updates=1, num_layers=-1)
    start = weights(job)

    def loss():
        total = mx.array(0.0)
        for i in range(4):
            tokens, mask = (mx.array(x) for x in examples.example(i))
            losses = nn.losses.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])
            total = total + (losses * mask[1:]).sum()
        return total / (30 + 7 + 19 + 12 - 4 * 2)

    import mlx.optimizers as optim

    value, gradient = nn.value_and_grad(model, loss)()
    limited, norm = optim.clip_grad_norm(gradient, 0.1)
    optim.AdamW(learning_rate=1e-3).update(model, limited)
    loop.train(job, state)
    assert column(state, "loss") == [pytest.approx(value.item(), rel=1e-6)]
    assert column(state, "grad_norm") == [pytest.approx(norm.item(), rel=1e-5)]
    assert norm.item() > 0.1
    assert distance(weights(job), weights(reference), start) < 1e-4


@pytest.mark.parametrize(
    "plan",
    [
        Plan(batch_size=1, batch_tokens=64, widths=(64,), loss_chunk=0),
        Plan(batch_size=2, batch_tokens=128, widths=(24, 64), recompute=1, loss_chunk=16),
        Plan(batch_size=4, batch_tokens=100, widths=(16, 32, 48, 64), attention_block=16),
    ],
)
def test_any_plan_gives_the_same_run(tmp_path, plan):
    examples, valid = random_examples(LENGTHS), random_examples([14, 40], seed=5)
    settings = {"updates": 10, "learning_rate": 1e-4, "updates_per_eval": 5}
    job, state = make(tmp_path / "a", examples, valid, **settings)
    other, its = make(tmp_path / "b", examples, valid, plan=plan, **settings)
    start = weights(job)
    loop.train(job, state)
    loop.train(other, its)
    assert distance(weights(other), weights(job), start) < 1e-4
    assert column(its, "loss") == pytest.approx(column(state, "loss"), rel=1e-5)
    assert column(its, "loss", "valid") == pytest.approx(column(state, "loss", "valid"), rel=1e-5)
    for name in ("update", "epoch", "targets", "tokens", "learning_rate"):
        assert column(its, name) == column(state, name)


def test_g7_validation_is_the_same_number_every_time(tmp_path):
    valid = random_examples([14, 40, 27], seed=5)
    job, state = make(
        tmp_path, random_examples(LENGTHS), valid, learning_rate=0.0, updates_per_eval=1
    )
    loop.train(job, state)
    losses = column(state, "loss", "valid")
    assert len(losses) == 6
    assert len(set(losses)) == 1


def test_g8_train_loss_is_validation_loss_on_the_same_rows(tmp_path):
    examples = random_examples(LENGTHS)
    job, state = make(
        tmp_path, examples, examples, learning_rate=0.0, effective_batch_size=10, updates=1
    )
    loop.train(job, state)
    assert column(state, "loss") == pytest.approx(column(state, "loss", "valid"), rel=1e-6)


def test_validation_never_changes_training(tmp_path):
    examples, valid = random_examples(LENGTHS), random_examples([14, 40], seed=5)
    lora = schema.LoraParameters(dropout=0.2)
    job, state = make(tmp_path / "a", examples, lora_parameters=lora)
    other, its = make(tmp_path / "b", examples, valid, lora_parameters=lora, updates_per_eval=1)
    loop.train(job, state)
    loop.train(other, its)
    assert all((weights(job)[name] == weights(other)[name]).all() for name in weights(job))
    assert state.history.updates.rows == its.history.updates.rows


def test_g12_the_best_by_validation_is_kept_and_named(tmp_path, monkeypatch):
    valid = random_examples([14, 40], seed=5)
    job, state = make(tmp_path, random_examples(LENGTHS), valid, updates_per_eval=2)
    kept, losses = {}, iter([5.0, 3.0, 4.0])

    def evaluate(*_):
        kept[state.update] = weights(job)
        return next(losses)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    loop.train(job, state)
    arrays, update, why = outputs.chosen(job, state)
    assert (update, why) == (4, "the best validation loss, 3.0000")
    assert all((np.array(arrays[name]) == kept[4][name]).all() for name in kept[4])
    assert any((kept[4][name] != kept[6][name]).any() for name in kept[4])
    assert [row[-1] for row in state.history.valid.rows] == ["True", "True", "False"]


def test_without_valid_rows_the_last_is_kept(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), patience=1, updates_per_eval=1)
    loop.train(job, state)
    arrays, update, why = outputs.chosen(job, state)
    assert (update, why) == (6, "the last one, nothing was validated")
    assert all((np.array(arrays[name]) == weights(job)[name]).all() for name in arrays)


def test_patience_ends_the_run(tmp_path, monkeypatch):
    valid = random_examples([14], seed=5)
    job, state = make(
        tmp_path, random_examples(LENGTHS), valid, updates=50, updates_per_eval=1, patience=2
    )
    losses = iter([5.0, 4.0, 4.5, 4.0, 1.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(losses))
    loop.train(job, state)
    assert state.update == 4
    assert state.best.update == 2


def test_stop_at_update_ends_early_on_the_schedule_of_the_whole_run(tmp_path):
    linear = schema.Schedule(name="linear")
    job, state = make(
        tmp_path, random_examples(LENGTHS), updates=11, stop_at_update=3, schedule=linear
    )
    loop.train(job, state)
    assert state.update == 3
    assert column(state, "learning_rate") == pytest.approx([1e-3, 9e-4, 8e-4])


def test_g13_full_fine_tuning_trains_the_top_layers_and_says_so(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), fine_tune_type="full", num_layers=1)
    before = {name: np.array(x) for name, x in tree_flatten(job.step.model.parameters())}
    loop.train(job, state)
    after = {name: np.array(x) for name, x in tree_flatten(job.step.model.parameters())}
    changed = {name.split(".")[2] for name in after if (after[name] != before[name]).any()}
    assert changed == {"3"}
    assert "in 1 layers from layer 3 up; embeddings frozen, head frozen" in job.step.attached.line()


def broken(job, update, part=0):
    """Make the loss of one micro-batch of one update NaN."""
    step, calls = job.step.gradient, []

    def gradient(micro, divisor, total=None, boundary=None):
        loss, total = step(micro, divisor, total, boundary)
        if loop_update() == update and len(calls) == part:
            calls.append(micro.ids.tolist())
            return float("nan"), total
        return loss, total

    state = []
    loop_update = lambda: state[0].update + 1
    job.step.gradient = gradient
    return state, calls


def test_g10_a_nonfinite_loss_stops_before_it_is_applied_and_names_the_rows(tmp_path):
    plan = Plan(batch_size=1, batch_tokens=64, widths=(64,))
    job, state = make(tmp_path, random_examples(LENGTHS), plan=plan)
    holder, calls = broken(job, update=3)
    holder.append(state)
    with pytest.raises(loop.NotFiniteError) as caught:
        loop.train(job, state)
    error = caught.value
    assert state.update == 2
    assert error.update == 3
    assert list(error.outcome.bad) == calls[0]
    expected = batching.effective_batches(10, 4, seed=0, epoch=0)[2]
    assert error.outcome.ids.tolist() == expected.tolist()
    assert optimizer.finite(job.step.model.trainable_parameters())


def test_skip_leaves_the_update_out_and_counts_it(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), on_nonfinite="skip")
    holder, _ = broken(job, update=3)
    holder.append(state)
    before = []
    take = loop.take

    def watched(job, state, *rest):
        before.append(weights(job))
        return take(job, state, *rest)

    loop.take = watched
    try:
        loop.train(job, state)
    finally:
        loop.take = take
    assert state.update == 6
    assert state.skipped == 1
    assert all((before[2][name] == before[3][name]).all() for name in before[2])
    assert column(state, "loss")[2] is None
    assert column(state, "grad_norm")[2] is None
    assert column(state, "learning_rate") == [1e-3] * 6


def test_skipping_has_a_limit(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), on_nonfinite="skip", updates=30)
    job.step.gradient = lambda micro, *_: (float("nan"), job.step.model.trainable_parameters())
    with pytest.raises(loop.NotFiniteError, match="after 10 skipped updates"):
        loop.train(job, state)
    assert state.update == state.skipped == 10


def test_weights_that_overflow_are_seen_at_once(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), optimizer="sgd")
    job = replace(job, rates=lambda done: 1e-3 if done < 2 else 1e39)
    with pytest.raises(loop.NotFiniteError, match="the weights after it are not finite"):
        loop.train(job, state)
    assert state.update == 2


def test_a_wish_to_stop_leaves_the_state_between_two_updates(tmp_path):
    plan = Plan(batch_size=1, batch_tokens=64, widths=(64,))
    examples = random_examples(LENGTHS)
    job, state = make(tmp_path / "a", examples, plan=plan)
    step, calls = job.step.gradient, []

    def gradient(*given):
        calls.append(1)
        if len(calls) == 6:
            job.stop.number = 15
        return step(*given)

    job.step.gradient = gradient
    with pytest.raises(Stopped):
        loop.train(job, state)
    assert (state.update, len(calls)) == (1, 6)
    job.stop.number = None
    loop.train(job, state)
    other, its = make(tmp_path / "b", examples, plan=plan)
    loop.train(other, its)
    assert state.history.updates.rows == its.history.updates.rows
    assert all((weights(job)[name] == weights(other)[name]).all() for name in weights(job))


def test_an_update_without_a_target_changes_nothing_by_its_gradient(tmp_path):
    examples = random_examples([8, 8, 8, 8], prompt=8)
    job, state = make(tmp_path, examples, optimizer="sgd", updates=2)
    before = weights(job)
    loop.train(job, state)
    assert column(state, "loss") == [0.0, 0.0]
    assert column(state, "targets") == [0, 0]
    assert all((weights(job)[name] == before[name]).all() for name in before)


def test_run_rows_are_telemetry_of_every_update(tmp_path):
    job, state = make(tmp_path, random_examples(LENGTHS), random_examples([9], seed=4))
    loop.train(job, state)
    assert column(state, "update", "run") == [1, 2, 3, 4, 5, 6]
    assert all(value > 0 for value in column(state, "seconds", "run"))
    assert all(value > 0 for value in column(state, "peak_gb", "run"))
    assert set(state.peaks) == {"micro_step", "update", "validation"}
    assert max(column(state, "peak_gb", "run")) == pytest.approx(
        max(state.peaks["micro_step"], state.peaks["update"]), rel=1e-6
    )


def test_g10_a_validation_loss_that_is_not_finite_stops_there(tmp_path, monkeypatch):
    """Weights that give NaN on the valid set are of no use, even where they are finite."""
    examples, valid = random_examples(LENGTHS), random_examples([12, 9], seed=1)
    job, state = make(tmp_path, examples, valid, updates_per_eval=2)
    monkeypatch.setattr(loop, "evaluate", lambda *_: float("nan"))
    with pytest.raises(loop.NotFiniteError, match="update 2: validation loss nan"):
        loop.train(job, state)
    assert state.best is None
    assert state.evaluated == 0
