"""A step that runs out of memory is done again in the process, or handed over; swap warns once."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import psutil
import pytest
from jobs import column, make, random_examples
from mlx.utils import tree_flatten

from stages.core.memory.plan import Plan
from stages.train import loop
from stages.train.recovery.guard import Guard, largest
from stages.train.recovery.ledger import HandOver, Ledger

LENGTHS = [20, 31, 9, 60, 12, 44, 33, 25]
MALLOC = "[malloc] Unable to allocate 1073741824 bytes."
MACHINE = {"threads": 1, "device": "cpu", "memory": {}}


def guarded(folder, model="llama", **train):
    """A job and its state as `jobs.make`, under a guard."""
    given = {"learning_rate": 1e-4, "updates": 4, "effective_batch_size": 8, **train}
    examples, valid = random_examples(LENGTHS), random_examples([30, 17], seed=1)
    plan = Plan(batch_size=8, batch_tokens=512, widths=(16, 32, 64), loss_chunk=16)
    job, state = make(folder, examples, valid, plan=plan, model=model, updates_per_eval=2, **given)
    job.store.folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(job.store.folder)
    ledger.begin(plan, plan, MACHINE)
    return replace(job, guard=Guard(job.step, examples, valid, ledger)), state


def fails(job, monkeypatch, when, error):
    """Let the loss raise while it is traced; `when` gets the call's number and the step."""
    calls, plain = [], type(job.step)._loss

    def loss(step, parameters, inputs):
        calls.append(1)
        if when(len(calls), step):
            step.model.update(parameters)  # traced arrays are in the model when it is raised
            raise error
        return plain(step, parameters, inputs)

    monkeypatch.setattr(type(job.step), "_loss", loss)


def weights(job):
    flat = tree_flatten(job.step.model.trainable_parameters())
    return np.concatenate([np.array(x, np.float64).ravel() for _, x in flat])


@pytest.mark.parametrize("model", ["llama", "nanbeige_looped"])
def test_the_same_update_again_with_half_the_rows_until_it_fits(tmp_path, monkeypatch, model):
    """At most 2 rows "fit", from the second micro-batch of the run on."""
    free, expected = guarded(tmp_path / "free", model)
    start = weights(free)
    loop.train(free, expected)
    job, state = guarded(tmp_path / "tight", model)
    too_large = lambda call, step: call > 1 and step.plan.batch_size > 2
    fails(job, monkeypatch, too_large, RuntimeError(MALLOC))
    loop.train(job, state)
    change = np.linalg.norm(weights(free) - start)
    assert np.linalg.norm(weights(job) - weights(free)) < 1e-4 * change
    assert column(state, "targets") == column(expected, "targets")
    events = job.guard.ledger.events
    assert [event["changed"]["batch_size"][1] for event in events][-1] <= 2
    assert {event["update"] for event in events} <= {1, 2}
    assert {event["kind"] for event in events} == {"memory"}
    assert job.step.plan == job.guard.ledger.plan == Ledger(job.store.folder).plan
    assert not job.guard.marker.path.exists()


def test_another_way_of_computing_is_handed_over_since_it_wants_its_check(tmp_path, monkeypatch):
    job, state = guarded(tmp_path)
    fails(job, monkeypatch, lambda call, step: call > 3, MemoryError("no room"))
    with pytest.raises(HandOver) as caught:
        loop.train(job, state)
    assert caught.value.death.kind == "memory"
    assert caught.value.marker.rows == 1
    assert job.step.plan.batch_size == 1
    assert job.step.plan.recompute == 0


def test_buffers_are_handed_over_at_once_and_the_state_stays_whole(tmp_path, monkeypatch):
    job, state = guarded(tmp_path)
    loop.update(job, state)
    before = weights(job)
    error = RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")
    fails(job, monkeypatch, lambda *_: True, error)
    with pytest.raises(HandOver) as caught:
        loop.update(job, state)
    assert (caught.value.death.kind, caught.value.marker.update) == ("handles", 2)
    assert (weights(job) == before).all()
    assert state.update == 1
    assert job.guard.ledger.events == []


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("x")])
def test_other_errors_pass(tmp_path, monkeypatch, error):
    job, state = guarded(tmp_path)
    fails(job, monkeypatch, lambda *_: True, error)
    with pytest.raises(type(error)):
        loop.update(job, state)


def test_several_ranks_never_redo_alone(tmp_path, monkeypatch):
    job, state = guarded(tmp_path)
    job.guard.alone = False
    fails(job, monkeypatch, lambda *_: True, RuntimeError(MALLOC))
    with pytest.raises(HandOver):
        loop.update(job, state)


def test_swap_that_grows_while_training_slows_warns_once(tmp_path, monkeypatch, capfd):
    job, state = guarded(tmp_path, updates=40)
    swap = psutil.swap_memory()
    clock = [0.0]
    monkeypatch.setattr("stages.train.recovery.guard.time.monotonic", lambda: clock[0])

    def work(seconds):
        def run():
            clock[0] += seconds
            return loop.micro_steps(job, 1, np.arange(8))

        return run

    for seconds, grown in [(1, 0)] * 6 + [(3, 2_000_000_000)] * 8:
        used = swap._replace(used=swap.used + grown)
        monkeypatch.setattr(psutil, "swap_memory", lambda used=used: used)
        job.guard.update(1, np.arange(8), work(seconds))
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("swap has grown by 2.0 GB") == 1
    assert "set memory.budget_gb lower" in said
    assert state.update == 0


def test_the_largest_micro_batch_by_hand():
    plan = Plan(batch_size=4, batch_tokens=128, widths=(16, 32, 64))
    assert largest(np.array([10, 12, 60]), plan) == (1, 64)
    assert largest(np.array([50, 60, 64]), plan) == (2, 64)
    assert largest(np.array([30] * 4), plan) == (4, 32)
    assert largest(np.array([64] * 2000), plan) == (2, 64)  # not cut, since that takes long
    assert math.prod(largest(np.array([10] * 3 + [32] * 5), plan)) == 128


def test_what_a_step_will_take_follows_the_largest_one_so_far(tmp_path):
    job, _ = guarded(tmp_path)
    guard = Guard(job.step, job.examples, job.valid, job.guard.ledger, check=(1000, 100))
    assert guard._needed(50, 0) == 1000
    assert guard._needed(300, 0) == 3000
    guard._learn(9000, 200)
    assert guard._needed(400, 0) == 18000
    guard._learn(10, 1)
    assert guard._needed(400, 0) == 18000
    job.step.plan = replace(job.step.plan, predicted_peak_gb=5e-5)
    assert guard._needed(400, 20000) == 30000
    assert guard._needed(400, mx.get_active_memory() + 50000) == 18000
