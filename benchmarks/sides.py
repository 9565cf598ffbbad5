"""One update of either side, whole and in parts, in this process. Needs MLX prepared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.tuner import trainer
from mlx_lm.tuner.datasets import CacheDataset

from benchmarks import operations, ours, parts, theirs
from benchmarks import subject as subjects
from benchmarks.operations import Cost
from benchmarks.profile import BUILDING, OPTIMIZER
from benchmarks.spec import OURS, Spec
from benchmarks.subject import Subject
from stages.core.layers.guard import perturbed_adapters
from stages.core.layers.staged import StagedModel
from stages.core.machine.device import Device
from stages.core.memory.plan import Plan
from stages.core.update import batching
from stages.train import loop, optimizer

TRIES = 3


def measured(spec: Spec, chosen: Device) -> dict[str, Any]:
    """Seconds of the parts, their costs, the device's rates and the whole update.

    The examples of the spec are one update, so a pass is one.
    """
    settings = subjects.settings_of(spec)
    manifest, examples = subjects.manifest_of(spec), subjects.examples_of(spec)
    plan = subjects.equal_rows(spec, manifest, examples, chosen.kind)
    lazy = spec.side == OURS and plan.activation_cache
    subject = subjects.load(spec, chosen, settings, lazy=lazy)
    with perturbed_adapters(subject.model):
        found = _ours(subject, plan, spec) if spec.side == OURS else _theirs(subject, spec)
    dtype = getattr(mx, manifest.dtype)
    return {
        **found,
        "rates": operations.rates(chosen.kind, dtype),
        "model": manifest.line(),
        "dtype": manifest.dtype,
    }


def _ours(subject: Subject, plan: Plan, spec: Spec) -> dict[str, Any]:
    ours.forget_activations(subject)
    job, state = ours.prepare(subject, plan, spec)
    whole = [ours.one_pass(job, state) for _ in range(spec.passes)]
    step, store = job.step, job.stored.get("train")
    micros = batching.micro_batches(subject.examples, loop.batches_of(job, 0)[0], step.plan)
    if store is not None:
        store.expect(micros)
    given = [(micro, {} if store is None else store.boundary(micro)) for micro in micros]
    cut = subject.attached.cut
    around = parts.functions(step.plan, step.staged, cut)
    timer = parts.Parts(subject.model, step.staged, cut, step.plan.compiled, around)
    parts.of_ours(timer, given, step.plan)
    gradient = _zeros(subject.model)
    applied = lambda: optimizer.apply(subject.model, state.optimizer, gradient, 0.0)
    timer.seconds |= {OPTIMIZER: least(applied), BUILDING: timer.built}
    shapes = [micro.tokens_BT.shape for micro in micros]
    counts = [micro.targets for micro in micros]
    loss = float(ours.column(state.history.updates, "loss")[0])
    for kept in job.stored.values():
        kept.close()
    ours.forget_activations(subject)
    return {
        "update_s": min(whole[1:]),
        "loss": loss,
        "seconds": timer.seconds,
        "costs": costs(subject, shapes, counts, frozen=store is None),
        "plan": step.plan.record(),
    }


def _theirs(subject: Subject, spec: Spec) -> dict[str, Any]:
    found = theirs.measure(subject, spec)
    dataset = CacheDataset(theirs.Rows(subject.examples))
    batches = list(trainer.iterate_batches(dataset, spec.rows, spec.cap))
    with StagedModel(subject.model) as staged:
        timer = parts.Parts(subject.model, staged, subject.attached.cut, compiled=True)
        parts.of_theirs(timer, batches)
    adam = optim.AdamW(learning_rate=0.0)
    gradient = _zeros(subject.model)

    def applied() -> None:
        adam.update(subject.model, gradient)
        mx.eval(subject.model.trainable_parameters(), adam.state)

    timer.seconds |= {OPTIMIZER: least(applied), BUILDING: timer.built}
    shapes = [(batch.shape[0], batch.shape[1] - 1) for batch, _ in batches]
    counts = [rows * width for rows, width in shapes]
    return {
        "update_s": min(found["later_s"]),
        "loss": found["loss"],
        "seconds": timer.seconds,
        "costs": costs(subject, shapes, counts, frozen=True),
    }


def costs(
    subject: Subject, shapes: Sequence[tuple[int, int]], counts: Sequence[int], frozen: bool
) -> dict[str, Cost]:
    """What each part needs at least, over all micro-batches.

    Args:
        shapes: (rows, padded tokens) of each.
        counts: Positions whose logits are made, of each.
        frozen: Whether the frozen layers run; else their weights may be gone.
    """
    layers, cut = list(subject.model.layers), subject.attached.cut
    facts = subject.manifest
    packed = (facts.quantization or {}).get("bits")
    size = getattr(mx, facts.dtype).size
    weight = int(facts.embedding_rows * facts.hidden_size * (packed / 8 if packed else size))
    summed = lambda cost, over: sum((cost(layer, *s) for s in shapes for layer in over), Cost())
    heads = (
        operations.head(facts.embedding_rows, facts.hidden_size, weight, count, size)
        for count in counts
    )
    return {
        parts.FROZEN: summed(operations.forward, layers[:cut] if frozen else ()),
        parts.FORWARD: summed(operations.forward, layers[cut:]),
        parts.BACKWARD: summed(operations.backward, layers[cut:]),
        parts.HEAD: sum(heads, Cost()),
        OPTIMIZER: operations.optimizer(subject.model),
    }


def least(run: Callable[[], object]) -> float:
    """Least seconds of a few, after one that is not timed."""
    run()
    seconds = []
    for _ in range(TRIES):
        mx.synchronize()
        started = time.perf_counter()
        run()
        mx.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _zeros(model: nn.Module) -> dict[str, Any]:
    gradient = tree_map(lambda x: mx.zeros(x.shape, mx.float32), model.trainable_parameters())
    mx.eval(gradient)
    return gradient
