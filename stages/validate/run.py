"""Checks of the run: its updates, schedule, validations, optimizer and adapters to start from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.core import paths
from stages.core.config.schema import Settings
from stages.core.config.settings import nearest
from stages.core.errors import UserError
from stages.core.update.batching import updates_in_run, updates_per_epoch
from stages.core.update.schedule import warmup_updates
from stages.validate.check import ERROR, WARNING, Check
from stages.validate.facts import Facts

ADAPTERS = "data/adapters"
FLAGS = ("bias_correction", "nesterov", "scale_parameter", "relative_step", "warmup_init")
OPTIMIZER_KEYS = {
    "adam": {"betas", "eps", "bias_correction"},
    "adamw": {"betas", "eps", "weight_decay", "bias_correction"},
    "sgd": {"momentum", "weight_decay", "dampening", "nesterov"},
    "muon": {"momentum", "weight_decay", "nesterov", "ns_steps"},
    "adafactor": {
        "eps",
        "clip_threshold",
        "decay_rate",
        "beta_1",
        "weight_decay",
        "scale_parameter",
        "relative_step",
        "warmup_init",
    },
}
"""Arguments of mlx's optimizers beside the learning rate (a test reads them from mlx itself)."""


def checks(facts: Facts, settings: Settings) -> Iterator[Check]:
    """All checks of the run."""
    total = updates(facts, settings)[1]
    yield updates_check(facts, settings, total)
    if total:
        yield schedule(settings, total)
        yield stop(settings, total)
        yield validations(facts, settings, total)
    yield optimizer_config(settings)
    yield dropout(settings)
    yield initial_adapters(settings)


def updates(facts: Facts, settings: Settings) -> tuple[int, int]:
    """Updates of one epoch and of the whole run."""
    train, count = settings.train, facts.counts["train"].examples
    batch = train.effective_batch_size
    if count == 0:
        return 0, 0
    total = updates_in_run(count, batch, train.epochs, train.updates)
    return updates_per_epoch(count, batch), total


def updates_check(facts: Facts, settings: Settings, total: int) -> Check:
    """G2: a run of no updates is an error before it starts."""
    if total:
        return Check("updates", found=total)
    return Check(
        "updates",
        ERROR,
        "the run would have 0 updates",
        found=f"{facts.counts['train'].examples} train examples, "
        f"epochs={settings.train.epochs}, updates={settings.train.updates}",
        expected="at least 1 update",
        fix="add train rows, or raise train.epochs or train.updates",
    )


def schedule(settings: Settings, total: int) -> Check:
    """G4: the warm-up leaves room for the rest of the run."""
    try:
        warmup = warmup_updates(settings.train.schedule, total)
    except UserError as error:
        text = error.record()
        return Check("schedule", ERROR, text["what"], text["found"], text["expected"], text["fix"])
    name = settings.train.schedule.name
    return Check("schedule", found=f"{name}, {warmup} of {total} updates are warm-up")


def stop(settings: Settings, total: int) -> Check:
    """Where the run ends early."""
    at = settings.train.stop_at_update
    if at is None:
        return Check("stop_at_update")
    if at > total:
        message = "train.stop_at_update lies beyond the run and does nothing"
        return Check("stop_at_update", WARNING, message, at, f"below {total}", "set it to null")
    try:
        warmup = warmup_updates(settings.train.schedule, total)
    except UserError:
        warmup = 0
    if at <= warmup:
        return Check(
            "stop_at_update",
            WARNING,
            "the run stops before its warm-up ends",
            found=f"stop at update {at}, warm-up of {warmup}",
            fix="stop later, or shorten train.schedule.warmup",
        )
    return Check("stop_at_update", message=f"the run stops at update {at} of {total}", found=at)


def validations(facts: Facts, settings: Settings, total: int) -> Check:
    """Whether patience can ever act, and validations come before the end."""
    train = settings.train
    total = min(total, train.stop_at_update or total)
    between = train.updates_per_eval or total
    if train.patience is not None and total // between <= train.patience:
        return Check(
            "validations",
            WARNING,
            "train.patience can't act: the run has too few validations",
            found=f"{total // between} validations, patience {train.patience}",
            expected=f"more than {train.patience} validations",
            fix="set train.updates_per_eval to a smaller number of updates",
        )
    if train.updates_per_eval is not None and train.updates_per_eval > total:
        message = "the run ends before train.updates_per_eval: it is validated at the end only"
        return Check(
            "validations", WARNING, message, train.updates_per_eval, f"at most {total} updates"
        )
    return Check("validations")


def optimizer_config(settings: Settings) -> Check:
    """Every key of the optimizer's own section is an argument of it, every value of its kind."""
    name, title = settings.train.optimizer, "optimizer_config"
    sections: dict[str, Any] = settings.train.optimizer_config
    wrong = [f"{section} (no optimizer)" for section in sections if section not in OPTIMIZER_KEYS]
    own = sections.get(name) or {}
    known = sorted(OPTIMIZER_KEYS[name])
    if not isinstance(own, dict):
        wrong, own = [*wrong, f"{name}: {own}"], {}
    unknown = [key for key in own if key not in known]
    odd = {key: _kind(name, key) for key in own if key in known and not _fits(name, key, own[key])}
    wrong += [str(key) for key in unknown] + [f"{key}: {own[key]}" for key in odd]
    if not wrong:
        return Check(title)
    fix = "write it as {optimizer: {key: value}}"
    if odd:
        fix = "; ".join(f"{key} takes {kind}" for key, kind in odd.items())
    if unknown:
        close = ", ".join(f"{key} → {nearest(str(key), known)}" for key in unknown)
        fix = f"nearest: {close}"
    message = "train.optimizer_config holds what the optimizer does not take"
    expected = f"{name}: {', '.join(known)}"
    return Check(title, ERROR, message, ", ".join(wrong), expected, fix)


def _kind(optimizer: str, key: str) -> str:
    """What kind of value a key of an optimizer takes."""
    if key in FLAGS:
        return "true or false"
    pair = key == "betas" or (optimizer, key) == ("adafactor", "eps")
    return "two numbers" if pair else "a number"


def _fits(optimizer: str, key: str, value: Any) -> bool:
    kind = _kind(optimizer, key)
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "two numbers":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return _is_number(value) or (key == "beta_1" and value is None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def dropout(settings: Settings) -> Check:
    """LoRA dropout narrows what "the same step" means."""
    rate = settings.train.lora_parameters.dropout
    if not rate or settings.train.fine_tune_type == "full":
        return Check("dropout")
    return Check(
        "dropout",
        WARNING,
        "dropout draws its noise per micro-batch: steps on two machines then agree in their "
        "distribution, not in their numbers",
        found=rate,
        expected="0 for the same step on every machine",
        fix="set train.lora_parameters.dropout=0 where that matters",
    )


def initial_adapters(settings: Settings) -> Check:
    """The adapters to start from are there, and of the shape that is trained."""
    train, name = settings.train, "initial_adapters"
    if train.initial_adapters is None:
        return Check(name)
    folder = Path(train.initial_adapters)
    missing = [
        file
        for file in ("adapters.safetensors", "adapter_config.json")
        if not (folder / file).is_file()
    ]
    if missing:
        message = "train.initial_adapters is no adapter folder"
        fix = "set it to a folder that train or mlx-lm wrote, or to null"
        return Check(name, ERROR, message, f"{folder} without {', '.join(missing)}", "", fix)
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        return Check(name, ERROR, "adapter_config.json is not valid JSON", str(error))
    differs = [
        f"{key} {there} (train: {here})"
        for key, there, here in _pairs(config, settings)
        if there != here
    ]
    if not differs and not paths.inside(folder, ADAPTERS):
        message = f"train.initial_adapters lie outside {ADAPTERS}: DVC cannot see changes"
        fix = f"move them to {ADAPTERS}/NAME and `dvc add` that"
        return Check(name, WARNING, message, str(folder), "", fix)
    if not differs:
        return Check(name)
    message = "train.initial_adapters were trained with another shape"
    fix = "set train.* as they were trained, or start from other adapters"
    return Check(name, ERROR, message, "; ".join(differs), "equal settings", fix)


def _pairs(config: dict[str, Any], settings: Settings) -> Iterator[tuple[str, Any, Any]]:
    train = settings.train
    yield "fine_tune_type", config.get("fine_tune_type", "lora"), train.fine_tune_type
    if train.fine_tune_type == "full":
        return
    there = config.get("lora_parameters", {})
    yield "rank", there.get("rank"), train.lora_parameters.rank
    keys = train.lora_parameters.keys
    if keys is not None and there.get("keys") is not None:
        yield "keys", sorted(there["keys"]), sorted(keys)
