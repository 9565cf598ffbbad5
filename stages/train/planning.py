"""The plan of a session: a recovery's, its checkpoint's, a measured one, or the rule's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.core import console
from stages.core.config.settings import Settings
from stages.core.machine.device import Device
from stages.core.memory.choose import choose, machine_budget
from stages.core.memory.plan import Plan
from stages.core.memory.rule import by_rule
from stages.core.model.manifest import Manifest
from stages.core.tables import Examples
from stages.train.checkpoint import Saved


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
    """What the planner chooses under a budget that a person set; else the plan by rule.

    Raises:
        UserError: Nothing fits the budget.
    """
    if job.settings.memory.budget_gb == "auto":
        lengths = np.concatenate([job.examples.lengths, job.valid.lengths])
        return by_rule(job.settings, job.manifest, lengths, job.device.kind)
    choice = choose(job.settings, job.manifest, job.examples, job.valid, job.device)
    for note in choice.notes:
        console.warn(note)
    console.say(choice.line())
    return choice.plan
