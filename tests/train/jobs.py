"""Jobs on small random models, in this process: what a session builds from settings and files."""

from dataclasses import replace

import numpy as np
from small_models import VOCABULARY, build

from stages.core.config import schema
from stages.core.memory.plan import Plan
from stages.core.model.trainable import attach
from stages.core.tables import Examples
from stages.core.update import batching, schedule
from stages.core.update.step import Step
from stages.train import loop, optimizer
from stages.train.checkpoint import Store
from stages.train.state import TrainState
from stages.train.stopping import Stop

PLAN = Plan(batch_size=4, batch_tokens=256, widths=(16, 32, 64))


def random_examples(lengths, seed=0, prompt=2):
    """Random tokens; all after the first `prompt` are targets. Rows count from 100."""
    draw = np.random.default_rng(seed)
    place = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.zeros(0)
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=draw.integers(1, VOCABULARY, int(sum(lengths))).astype(np.int32),
        target_mask=place >= prompt,
        row=100 + np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def make(folder, examples, valid=None, plan=PLAN, model="llama", run=None, **train):
    """A job and its first state. `train` are fields of schema.Train, `run` of schema.Run."""
    given = {"num_layers": 2, "learning_rate": 1e-3, "effective_batch_size": 4, "updates": 6}
    settings = schema.Train(**{**given, **train})
    if settings.epochs is not None:
        settings = replace(settings, updates=None)
    network = build(model) if isinstance(model, str) else model
    attached = attach(network, settings)
    updates = batching.updates_in_run(
        len(examples), settings.effective_batch_size, settings.epochs, settings.updates
    )
    job = loop.Job(
        train=settings,
        run=schema.Run(**(run or {})),
        step=Step(network, attached, plan),
        examples=examples,
        valid=random_examples([]) if valid is None else valid,
        rates=schedule.rates(settings, updates),
        updates=updates,
        last=min(updates, settings.stop_at_update or updates),
        store=Store(folder / "run", "run", {"threads": 1}),
        stop=Stop(),
    )
    return job, TrainState(optimizer.build(settings, network))


def column(state, name, rows="updates"):
    """One column of a run's rows, as numbers; empty cells are None."""
    table = getattr(state.history, rows)
    index = table.columns.index(name)
    return [float(row[index]) if row[index] else None for row in table.rows]
