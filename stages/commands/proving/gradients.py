"""Gradients of one effective batch: whole against every cut, and every memory setting."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from stages.commands.proving import reference
from stages.commands.proving.finding import Finding, distance, relative
from stages.commands.proving.reference import Reference, Whole
from stages.commands.proving.trial import Trial, checked_step, without_dropout
from stages.core.activations import identity
from stages.core.activations.prepare import Source, prepare
from stages.core.activations.reader import Activations
from stages.core.layers.guard import perturbed_adapters
from stages.core.memory.plan import Plan
from stages.core.update import batching
from stages.core.update.check import SWITCHES
from stages.core.update.step import Step
from stages.train import loop

FLOAT32_TOLERANCE = 1e-5
EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next number of the type."""
EPSILONS = 2.0
TIMES_PADDING = 3.0
"""How far a cut may be, in distances of two paddings of one whole batch."""
WIDER = 32
SHORT_CHUNK = 16


@dataclass(frozen=True)
class Compared:
    """What every gradient is compared with.

    Attributes:
        whole: The plain gradient of the whole batch.
        tolerance: The most that another way may differ.
        paddings: How far another padding of the whole batch is from it.
    """

    whole: Reference
    tolerance: float
    paddings: float


@contextmanager
def compared(trial: Trial) -> Iterator[Compared]:
    """The plain gradient of the whole batch; inside, no dropout, and no lora_b is zero.

    A lora_b of zero would hide the gradient of lora_a.
    """
    with without_dropout(trial.model), perturbed_adapters(trial.model):
        whole = reference.plain(trial.model, whole_batch(trial))
        other = reference.plain(trial.model, whole_batch(trial, WIDER))
        paddings = distance(other[1], whole[1])
        yield Compared(whole, tolerance(trial, paddings, FLOAT32_TOLERANCE, EPSILONS), paddings)


def tolerance(trial: Trial, paddings: float, float32: float, epsilons: float) -> float:
    """`float32`, or in other types a few times the distance of two paddings of a whole batch.

    At least some epsilons of the type: where a device's kernels give the same bits at any padding,
    that distance is 0.
    """
    if trial.float32:
        return float32
    arrays = tree_flatten(trial.model.parameters())
    types = {str(x.dtype).removeprefix("mlx.core.") for _, x in arrays}
    floor = epsilons * max(EPSILON.get(name, 0.0) for name in types)
    return max(TIMES_PADDING * paddings, floor)


def cuts(trial: Trial, against: Compared) -> Iterator[Finding]:
    """The batch in every cut, padded otherwise, compiled, as this run plans, and by mlx-lm."""
    way = "mlx-lm's own loss, its padding target removed"
    yield _finding("cuts", way, reference.by_mlx_lm(trial.model, whole_batch(trial)), against)
    with checked_step(trial, trial.plan(trial.rows)) as step:
        for note in step.notes:
            yield Finding("cuts", note, None, against.tolerance, note="training switches it off")
        for name, plan in _plans(trial, step.plan):
            step.plan = plan
            yield _finding("cuts", name, gradient(trial, step), against)
    compiled = trial.plan(max(1, trial.rows // 2), compiled=True)
    yield _under(compiled, trial, against, what=("cuts", "compiled"), switch="compiled")
    planned = replace(trial.run_plan, activation_cache=False)
    yield _under(planned, trial, against, what=("cuts", "as this run plans"))


def memory(trial: Trial, against: Compared) -> Iterator[Finding]:
    """Each memory setting alone, then all together."""
    rows = max(1, trial.rows // 2)
    block = max(8, max(trial.widths) // 4)
    for name, switch, changes in (
        ("all targets in one piece", "", {"loss_chunk": 0}),
        (f"loss in chunks of {SHORT_CHUNK}", "", {"loss_chunk": SHORT_CHUNK}),
        ("every trained layer recomputed", "recompute", {"recompute": 1}),
        ("every 2nd recomputed", "recompute", {"recompute": 2}),
        ("the first half recomputed", "recompute", {"recompute": 2, "recompute_place": "first"}),
        ("the last half recomputed", "recompute", {"recompute": 2, "recompute_place": "last"}),
        (f"attention in blocks of {block}", "attention_block", {"attention_block": block}),
    ):
        plan = trial.plan(rows, **changes)
        yield _under(plan, trial, against, what=("memory", name), switch=switch)
    every = {"loss_chunk": SHORT_CHUNK, "recompute": 1, "attention_block": block}
    with activations(trial) as (stored, why):
        for name, plan in (
            ("activation cache", trial.plan(rows)),
            ("all of these together", trial.plan(rows, **every)),
        ):
            if stored is None:
                yield Finding("memory", name, None, against.tolerance, note=why)
                continue
            with checked_step(trial, plan) as step:
                yield _finding("memory", name, gradient(trial, step, stored), against)


def whole_batch(trial: Trial, wider: int = 0) -> Whole:
    """The batch as it is defined, padded to its longest example and `wider` more."""
    return reference.whole(trial.examples, trial.rows, wider)


def gradient(trial: Trial, step: Step, stored: dict[str, Activations] | None = None) -> Reference:
    """Loss and gradient of the batch through the training loop's own code."""
    job = replace(trial.job(step, Path("unused")), stored=stored or {})
    outcome = loop.micro_steps(job, 1, trial.ids)
    return outcome.loss, outcome.gradient


def _plans(trial: Trial, way: Plan) -> Iterator[tuple[str, Plan]]:
    """Cuts into micro-batches of each size, where they differ, and other paddings."""
    seen = set()
    for rows in range(1, trial.rows + 1):
        plan = replace(way, batch_size=rows, batch_tokens=trial.plan(rows).batch_tokens)
        parts = batching.groups(trial.examples.lengths, trial.ids, plan)
        cut = tuple(part.tobytes() for part in parts)
        if cut not in seen:
            seen.add(cut)
            yield f"micro-batches of at most {rows}: {len(parts)} of them", plan
    own = tuple(sorted(set(trial.examples.lengths.tolist())))
    yield "row by row without padding", replace(way, batch_size=1, widths=own)
    wide = (max(trial.widths) + WIDER,)
    tokens = trial.rows * wide[0]
    yield (
        f"whole, padded to {wide[0]}",
        replace(way, batch_size=trial.rows, batch_tokens=tokens, widths=wide),
    )


def _under(
    plan: Plan, trial: Trial, against: Compared, *, what: tuple[str, str], switch: str = ""
) -> Finding:
    """The gradient under a plan, or why its `switch` is off on this model."""
    part, name = what
    with checked_step(trial, plan) as step:
        notes = step.notes
        if switch:
            word, value = SWITCHES[switch]
            notes = [note for note in notes if note.startswith(word)]
            off = getattr(step.plan, switch) == value
        else:
            off = part == "memory" and step.staged is None
        if off:
            return Finding(part, name, None, against.tolerance, note="; ".join(notes))
        return _finding(part, name, gradient(trial, step), against)


@contextmanager
def activations(trial: Trial) -> Iterator[tuple[dict[str, Activations] | None, str]]:
    """The frozen layers' output for the examples, on the disk inside the block; or why it is not.

    Written and read as training does, below a name of its own, and removed.
    """
    plan = trial.plan(trial.rows)
    kind, cut = trial.device.kind, trial.attached.cut
    folder = identity.folder(trial.manifest, cut, trial.examples, kind)
    with checked_step(trial, plan) as step:
        if step.staged is None:
            yield None, "; ".join(step.notes)
            return
        source = Source(step.staged, cut, trial.manifest, plan, trial.settings.memory, kind)
        stored = prepare(source, {"train": trial.examples})
    try:
        if stored is None:
            yield None, "nothing is frozen, or there is no room for it"
            return
        with closing(stored["train"]):
            yield stored, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for left in folder.parent.glob(f"{folder.name}.*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _finding(part: str, what: str, found: Reference, against: Compared) -> Finding:
    (loss, gradient), (expected_loss, expected) = found, against.whole
    return Finding(
        part,
        what,
        measured=distance(gradient, expected),
        tolerance=against.tolerance,
        loss=relative(abs(loss - expected_loss), abs(expected_loss)),
    )


def lengths_of(trial: Trial) -> str:
    """Lengths of the batch's examples, for people."""
    sizes = np.sort(trial.examples.lengths[trial.ids]).tolist()
    return ", ".join(map(str, sizes))


def dropout_of(model: nn.Module) -> float:
    """The largest dropout rate in the model."""
    return max((1 - x._p_1 for x in model.modules() if isinstance(x, nn.Dropout)), default=0.0)
