"""One rank of a group: `python two_ranks.py BACKEND`, started by test_ranks.py as the stage is.

Every rank makes the same claims; the second one starts with other numbers than the first.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx import nn

from stages.core.config.schema import Launch
from stages.core.entry import Stopped
from stages.core.errors import RunFailed, UserError
from stages.core.memory.plan import Plan
from stages.train.history import History
from stages.train.ranks import messages, several
from stages.train.state import Best, TrainState
from stages.train.stopping import Stop


def main(backend):
    if backend == "ring":
        mx.set_default_device(mx.cpu)
    ranks = several.join(Launch(hosts=2, backend=backend))
    assert (ranks.size, ranks.first) == (2, ranks.rank == 0)
    for claim in (numbers, gradients, words, starts, apart, asked):
        claim(ranks)
        ranks.barrier()
    print(json.dumps({"rank": ranks.rank, "claims": "hold"}), flush=True)


def numbers(ranks):
    mine = [np.pi * (ranks.rank + 1), 1e-300, np.nan if ranks.rank else np.inf]
    found = ranks.together(Stop(), *mine)
    expected = [[np.pi, 1e-300, np.inf], [2 * np.pi, 1e-300, np.nan]]  # every bit of a float64
    assert np.array_equal(found, expected, equal_nan=True)
    assert ranks.most(ranks.rank * 2.5) == 2.5


def gradients(ranks):
    """Also where one array is larger than what is sent at once."""
    small, messages.BYTES_AT_ONCE = messages.BYTES_AT_ONCE, 64
    mine = {
        "a": mx.full((3,), 1.0 + ranks.rank),
        "b": [mx.arange(40).reshape(4, 10) * (ranks.rank + 1.0), mx.ones((2, 2))],
        "c": mx.full((5,), 1.0 + ranks.rank, dtype=mx.bfloat16),
    }
    summed = ranks.sum(mine)
    messages.BYTES_AT_ONCE = small
    assert np.array_equal(np.array(summed["a"]), np.full(3, 3.0))
    assert np.array_equal(np.array(summed["b"][0]), 3.0 * np.arange(40).reshape(4, 10))
    assert np.array_equal(np.array(summed["b"][1]), np.full((2, 2), 2.0))
    assert summed["c"].dtype == mx.float32
    assert np.array_equal(np.array(summed["c"]), np.full(5, 3.0))


def words(ranks):
    assert ranks.messages.tell({"é": [1, None]} if ranks.first else "not heard") == {"é": [1, None]}
    plan = Plan(batch_size=3 + ranks.rank, batch_tokens=64, widths=(16, 32))
    assert ranks.agreed(lambda: plan).batch_size == 3
    ranks.require_equal("their settings", "one")
    with pytest.raises(UserError) as caught:
        ranks.require_equal("their settings", f"of rank {ranks.rank}")
    assert caught.value.found == "another one at rank 1 (counted from 0)"


def trained(rank):
    """A model, its optimizer and where the run stands; the first rank's are of update 7."""
    mx.random.seed(rank)
    model = nn.Linear(4, 3)
    model.weight = model.weight.astype(mx.bfloat16)
    state = TrainState(optim.Adam(learning_rate=0.1), history=History())
    state.optimizer.init(model.trainable_parameters())
    if rank == 0:
        state.update, state.evaluated, state.best = 7, 5, Best(5, 1.25)
        state.optimizer.update(model, {"weight": mx.ones((3, 4)), "bias": mx.ones((3,))})
    return model, state


def starts(ranks):
    model, state = trained(ranks.rank)
    expected, _ = trained(0)
    if ranks.first:  # as after reading a file
        state.optimizer.state = dict(reversed(state.optimizer.state.items()))
    store = ranks.store(Path("checkpoints/name"), {"threads": 1})
    assert store.fingerprint == "name"
    ranks.start_equal(state, model, store)
    assert mx.array_equal(model.weight, expected.weight)
    assert mx.array_equal(model.bias, expected.bias)
    assert (state.update, state.evaluated, state.best) == (7, 5, Best(5, 1.25))
    assert state.optimizer.step.item() == 1
    assert mx.allclose(state.optimizer.state["bias"]["m"], mx.full((3,), 0.1))
    if not ranks.first:
        assert store.holds(state)
        state.update += 1
        assert not store.holds(state)
        store.save(state, None, 1)
        assert store.holds(state)
        store.keep_best(state, model)
        assert not store.folder.exists()
        assert store.latest(100) is None


def apart(ranks):
    model, state = trained(0)
    ranks.keep_equal(model, state.optimizer)
    bias = np.array(model.bias)
    model.bias = model.bias * (1 + 1e-6 * ranks.rank)
    ranks.keep_equal(model, state.optimizer)  # as two kinds of machine round
    assert np.array_equal(np.array(model.bias), bias)
    model.bias = model.bias + 0.1 * ranks.rank  # as if one rank had missed an update
    with pytest.raises(RunFailed, match="come apart"):
        ranks.keep_equal(model, state.optimizer)


def asked(ranks):
    stop = Stop()
    stop.number = 15 if ranks.rank else None
    assert ranks.asked(stop) == (ranks.rank == 1)
    with pytest.raises(Stopped) as caught:
        ranks.together(stop, 1.0)
    assert caught.value.number == 15


if __name__ == "__main__":
    main(sys.argv[1])
