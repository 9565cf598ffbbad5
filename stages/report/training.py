"""How training went: loss, learning rate, gradient norm; memory and speed of the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from stages.report import charts, words
from stages.report.html import Markup, facts, join, tag
from stages.report.inputs import Inputs, Training
from stages.report.section import Section, absent, heading, notice


def section(inputs: Inputs) -> Section:
    """Curves over updates: results, equal on every machine up to rounding."""
    training = inputs.training
    if training is None:
        return Section("training", "Training", absent("The training history", "train"))
    body: list[Any] = [*state(training)]
    if len(training.history):
        body.append(charts.loss(training.history, training.valid))
        body.append(
            tag(
                "div",
                charts.over_updates("Learning rate", training.history, "learning_rate", ""),
                charts.over_updates("Gradient norm", training.history, "grad_norm", "unclipped"),
                class_="grid2",
            )
        )
    else:
        body.append(tag("p", "No update has been recorded.", class_="absent"))
    return Section("training", "Training", join(body), lead(inputs, training))


def lead(inputs: Inputs, training: Training) -> str:
    """How much was trained, in one sentence."""
    history = training.history
    if not len(history):
        return ""
    targets, tokens = (int(history[name].sum()) for name in ("targets", "tokens"))
    batch = inputs.settings.train.effective_batch_size
    return (
        f"{words.plural(len(history), 'update')} of at most {words.plural(batch, 'example')},"
        f" {words.count(targets)} targets in {words.count(tokens)} tokens,"
        f" {history['epoch'].iloc[-1]:.2f} passes over the data."
    )


def state(training: Training) -> list[Markup]:
    """Notices about a run that did not simply end at its last update."""
    found = []
    if training.checkpoint is not None:
        found.append(
            notice(
                "warning",
                "Training has not finished. This is the newest checkpoint on this machine, update"
                f" {training.checkpoint}; ",
                tag("code", "dvc repro"),
                " goes on from it.",
            )
        )
    if training.stopped is not None:
        stopped = training.stopped
        found.append(
            notice("error", f"Training stopped at update {stopped['update']}: {stopped['what']}")
        )
    run = training.run
    done, whole = run.get("updates"), run.get("updates_of_whole_run")
    if done is not None and whole is not None and done < whole:
        found.append(
            notice(
                "info", f"The run ended after update {done} of {whole} (stop_at_update, patience)."
            )
        )
    if run.get("skipped_updates"):
        skipped = words.plural(run["skipped_updates"], "update")
        found.append(notice("warning", f"{skipped} skipped: the loss was not finite."))
    return found


def machine(inputs: Inputs) -> Section:
    """Telemetry of the machine that trained: where, how fast, how much memory."""
    training = inputs.training
    if training is None or not (training.run or len(training.telemetry)):
        return Section("machine", "Machine", absent("Telemetry of the training run", "train"))
    run, telemetry = training.run, training.telemetry
    body: list[Any] = [tag("div", _where(run, telemetry), _plan(run), class_="grid2")]
    body += [notice("info", note) for note in run.get("switched_off") or []]
    if len(telemetry):
        body.append(
            tag(
                "div",
                charts.memory(telemetry, run.get("plan") or {}),
                charts.over_updates("Speed", telemetry, "tokens_per_second", "tokens per second"),
                class_="grid2",
            )
        )
    lead_ = (
        "Telemetry of the machine that trained. It says how the work was cut and how fast it went;"
        " another machine takes the same steps."
    )
    return Section("machine", "Machine", join(body), lead_)


def _where(run: Mapping[str, Any], telemetry: pd.DataFrame) -> Markup:
    device = run.get("device") or {}
    rate = device.get("gflops")
    blas = device.get("blas")
    resumed = ", ".join(map(str, run.get("resumed_at_updates") or [])) or "never"
    pairs = [
        ("host", run.get("host")),
        ("device", _both(device.get("kind"), device.get("name"))),
        ("BLAS", _both(blas, f"{rate:.0f} GFLOP/s" if rate else None)),
        ("threads", device.get("threads")),
        ("updates took", _took(telemetry)),
        ("resumed at", resumed if run.get("host") else None),
        ("recoveries", _recoveries(run)),
    ]
    return tag("div", heading("Where"), facts(pairs))


def _plan(run: Mapping[str, Any]) -> Markup:
    plan = run.get("plan") or {}
    widths = plan.get("widths") or []
    every = plan.get("recompute")
    recompute = None if every is None else "off" if not every else _every(every)
    pairs = [
        ("micro-batch", _both(plan.get("batch_size"), "examples at most", " ")),
        ("padded tokens", words.count(plan["batch_tokens"]) if "batch_tokens" in plan else None),
        ("widths", ", ".join(map(str, widths)) or None),
        ("recomputed", recompute),
        ("loss chunk", _or_off(plan, "loss_chunk", "targets")),
        ("attention block", _or_off(plan, "attention_block", "queries")),
        ("activation cache", _on_off(plan.get("activation_cache"))),
        ("compiled", _on_off(plan.get("compiled"))),
        ("peak memory", _peaks(plan)),
        ("time per update", _predicted_seconds(plan)),
    ]
    return tag("div", heading("Plan"), facts(pairs))


def _peaks(plan: Mapping[str, Any]) -> str | None:
    predicted, measured = plan.get("predicted_peak_gb"), plan.get("measured_peak_gb")
    if predicted is None and measured is None:
        return None
    if predicted is None:
        return f"measured {words.gb(measured)}, by rule and not predicted"
    return f"predicted {words.gb(predicted)}, measured {words.gb(measured)}"


def _took(telemetry: pd.DataFrame) -> str | None:
    """Their time without validations, and tokens per second of all together."""
    seconds = charts.column(telemetry, "seconds")
    rates = charts.column(telemetry, "tokens_per_second")
    known = np.isfinite(seconds) & np.isfinite(rates) if len(rates) == len(seconds) else []
    if not np.any(known):
        return None
    total = float(seconds[known].sum())
    rate = float((rates[known] * seconds[known]).sum()) / total if total > 0 else math.nan
    return f"{words.seconds(total)}, {words.short(rate)} tokens per second"


def _predicted_seconds(plan: Mapping[str, Any]) -> str | None:
    predicted = plan.get("predicted_seconds")
    return None if predicted is None else f"predicted {words.seconds(predicted)}"


def _recoveries(run: Mapping[str, Any]) -> str | None:
    found = run.get("recoveries")
    if found is None:
        return None
    if not found:
        return "none"
    parts = [
        "; ".join(f"{key} {value}" for key, value in one.items()) if isinstance(one, dict) else one
        for one in found
    ]
    return " · ".join(map(str, parts))


def _every(k: int) -> str:
    if k == 1:
        return "every layer"
    ending = {2: "nd", 3: "rd"}.get(k, "th")
    return f"every {k}{ending} layer"


def _or_off(plan: Mapping[str, Any], name: str, unit: str) -> str | None:
    if name not in plan:
        return None
    return f"{plan[name]} {unit}" if plan[name] else "off"


def _on_off(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"


def _both(first: Any, second: Any, between: str = ", ") -> str | None:
    parts = [str(part) for part in (first, second) if part is not None]
    return between.join(parts) if first is not None and parts else None
