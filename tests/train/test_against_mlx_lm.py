"""The same weights as `mlx_lm.tuner.trainer.train`, where its mathematics is the same.

That is: rows of equal length, no padding (it counts one padding token per padded row as a target),
no remainder, and batches in our order (its own comes from NumPy's global random state).
"""

import math

import mlx.core as mx
import numpy as np
import pytest
from jobs import make, random_examples
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer
from mlx_lm.tuner.utils import build_schedule
from small_models import build

from stages.core.config import schema
from stages.core.memory.plan import Plan
from stages.core.model.trainable import attach
from stages.core.update import batching
from stages.train import loop, optimizer

TOKENS, EFFECTIVE, UPDATES = 33, 8, 6
"""mlx-lm pads inputs to a multiple of 32 plus one: 33 tokens get no padding."""


def trained(model):
    flat = tree_flatten(model.trainable_parameters())
    return {name: np.array(x, dtype=np.float64) for name, x in flat}


def by_mlx_lm(examples, settings, rows, steps, rate, folder):
    """Weights after UPDATES updates of mlx-lm's loop: `rows` a micro-batch, `steps` accumulated."""
    model = build("llama")
    attach(model, settings)
    start = trained(model)
    ours = []
    for epoch in range(UPDATES):
        ours += batching.effective_batches(len(examples), EFFECTIVE, settings.seed, epoch)

    def batches(dataset, batch_size, max_seq_length, **_):
        for ids in ours[:UPDATES]:
            # Any order inside the effective batch gives the same sum.
            for part in np.sort(ids).reshape(steps, rows):
                tokens = np.stack([dataset[i] for i in part])
                yield mx.array(tokens), mx.array([[2, TOKENS]] * rows)

    made = optimizer.build(settings, model)
    made.__init__(learning_rate=rate)
    trainer.train(
        model=model,
        optimizer=made,
        train_dataset=[examples.example(i)[0] for i in range(len(examples))],
        args=trainer.TrainingArgs(
            batch_size=rows,
            iters=UPDATES * steps,
            grad_accumulation_steps=steps,
            max_seq_length=TOKENS,
            adapter_file=folder / "theirs.safetensors",
        ),
        iterate_batches=batches,
    )
    return trained(model), start


def distance(a, b, start):
    difference = sum(((a[name] - b[name]) ** 2).sum() for name in b)
    change = sum(((b[name] - start[name]) ** 2).sum() for name in b)
    return math.sqrt(difference / change)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("rows", "steps"), [(8, 1), (2, 4)])
def test_equal_length_rows_give_mlx_lms_weights(tmp_path, rows, steps, kind):
    examples = random_examples([TOKENS] * 24)
    plan = Plan(batch_size=rows, batch_tokens=rows * TOKENS, widths=(TOKENS,))
    given = {
        "effective_batch_size": EFFECTIVE,
        "updates": UPDATES,
        "optimizer": kind,
        "learning_rate": 1e-4,
        "schedule": schema.Schedule(name="cosine", warmup=2, end=1e-5),
    }
    job, state = make(tmp_path, examples, plan=plan, **given)
    sizes = []
    step = job.step.gradient
    job.step.gradient = lambda micro, *rest: (sizes.append(len(micro.ids)), step(micro, *rest))[1]
    loop.train(job, state)
    # Their own words for this schedule: 2 updates of warm-up, then down over the 2 steps left.
    rate = build_schedule({"name": "cosine_decay", "arguments": [1e-4, 2, 1e-5], "warmup": 2})
    theirs, start = by_mlx_lm(examples, job.train, rows, steps, rate, tmp_path)
    assert sizes == [rows] * steps * UPDATES
    assert distance(trained(job.step.model), theirs, start) < 1e-5
    assert math.sqrt(sum(((theirs[name] - start[name]) ** 2).sum() for name in start)) > 1e-6
