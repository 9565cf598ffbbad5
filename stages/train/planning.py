"""The plan of a session: a recovery's, its checkpoint's, a measured one, or the rule's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.core import console
from stages.core.config.settings import Settings
from stages.core.machine.device import Device
from stages.core.memory.choose import choose, machine_budget, worth_measuring
from stages.core.memory.plan import Plan
from stages.core.memory.rule import by_rule
from stages.core.memory.survey import Surveyor
from stages.core.model.manifest import Manifest
from stages.core.tables import Examples
from stages.core.update import batching
from stages.train.checkpoint import Saved

PLANNING_S, KNOWN_S = 30.0, 3.0
"""What a choice takes: from nothing, and from measurements that are on the disk."""
SHARE = 0.05
"""Of a run that planning may take. A measured plan is rarely much faster than the rule's."""
TIGHT = 0.25
"""Share of the budget above which the weights leave so little room that steps are measured."""


@dataclass(frozen=True)
class Planned:
    """What a plan is made for."""

    settings: Settings
    manifest: Manifest
    examples: Examples
    valid: Examples
    device: Device


def plan(
    job: Planned, machine: dict[str, Any], saved: Saved | None, recovered: Plan | None
) -> Plan:
    """The plan of a session, with a line that says why where it is a new one.

    A checkpoint's plan is kept while device and memory settings are the same and it fits today's
    budget, so that a run that goes on gives the same bits. The plan of a recovery wins over that.

    Args:
        machine: Device, threads and memory settings now.
        saved: The checkpoint to go on from.
        recovered: The plan of the last recovery on such a machine.

    Raises:
        UserError: Nothing fits the budget.
    """
    if saved is None:
        return recovered or new(job)
    now, then = dict(machine), dict(saved.machine)
    threads = now.pop("threads"), then.pop("threads")
    if threads[0] != threads[1]:
        console.warn(
            f"OpenBLAS has {threads[0]} threads, {threads[1]} when the run was stopped:"
            " the last bits will differ from a run that was never stopped"
        )
    if recovered is not None:
        return recovered
    why = "device or memory settings changed since the checkpoint"
    if now == then:
        why = too_large(job, saved.plan)
    if not why:
        return saved.plan
    console.say(f"{why}: a new plan is used")
    return new(job)


def too_large(job: Planned, found: Plan) -> str:
    """Why a plan does not fit this machine now, "" where it does or nothing was predicted."""
    needs = found.predicted_peak_gb or 0.0
    budget = machine_budget(job.settings, job.device)
    if needs <= budget.gb:
        return ""
    limit = f"budget {budget.gb:.2f} GB ({budget.reason})"
    return f"the checkpoint's plan needs {needs:.2f} GB, {limit}"


def new(job: Planned) -> Plan:
    """The planner's plan where measuring pays, else the rule's; one line says which and why.

    Raises:
        UserError: Nothing fits the budget.
    """
    measured, why = decision(job)
    if not measured:
        lengths = np.concatenate([job.examples.lengths, job.valid.lengths])
        found = by_rule(job.settings, job.manifest, lengths, job.device.kind)
        size = f"micro-batches of at most {found.batch_size} rows and {found.batch_tokens} tokens"
        console.say(f"plan by rule, {why}: {size}")
        return found
    console.say(f"measures steps to choose the plan, {why}")
    choice = choose(job.settings, job.manifest, job.examples, job.valid, job.device)
    for note in choice.notes:
        console.warn(note)
    console.say(f"{choice.line()}; chosen in {choice.seconds:.1f} s")
    return choice.plan


def decision(job: Planned) -> tuple[bool, str]:
    """Whether steps are measured to choose the plan, and why.

    Always under a budget that a person set, and where the weights alone take much of an automatic
    one; never for models so small that any plan fits; else where it costs little of the run.
    """
    if job.settings.memory.budget_gb != "auto":
        return True, "since memory.budget_gb is set"
    if not worth_measuring(job.settings, job.manifest):
        return False, "since the model is small"
    limit = machine_budget(job.settings, job.device)
    weights = job.manifest.bytes
    if weights > TIGHT * limit.bytes:
        return True, f"since the weights take {weights / 1e9:.1f} of {limit.gb:.1f} GB"
    known = Surveyor(job.settings, job.manifest, job.device).known
    cost, run = KNOWN_S if known else PLANNING_S, run_seconds(job)
    words = f"about {cost:.0f} s against a run of about {told(run)}"
    if cost <= SHARE * run:
        return True, f"which takes {words}"
    return False, f"since measuring would take {words}"


def run_seconds(job: Planned) -> float:
    """A rough time of the run, from multiplications and the device's measured rate.

    Forward through all layers, backward through the trained ones, the head at targets both ways.
    """
    train, facts, examples = job.settings.train, job.manifest, job.examples
    updates = batching.updates_in_run(
        len(examples), train.effective_batch_size, train.epochs, train.updates
    )
    updates = min(updates, train.stop_at_update or updates)
    rows = updates * min(train.effective_batch_size, len(examples))
    head = facts.embedding_rows * facts.hidden_size
    layers = facts.parameters - head * (1 if facts.tied else 2)
    trained = train.num_layers if train.num_layers > 0 else facts.num_layers
    backward = (4 if train.fine_tune_type == "full" else 2) * trained / facts.num_layers
    per_row = layers * (2 + backward) * examples.lengths.mean()
    per_row += head * 4 * examples.targets.mean()
    return float(rows * per_row / (max(job.device.gflops, 1.0) * 1e9))


def told(seconds: float) -> str:
    """A time for a person."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
