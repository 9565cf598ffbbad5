"""Ranges of single settings, and settings that exclude each other: all problems at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.core.config.schema import Settings

CHOICES = {
    "model.dtype": ("stored", "float32", "bfloat16"),
    "data.format": ("auto", "text", "completion", "chat", "alpaca", "sharegpt"),
    "data.on_bad_row": ("error", "drop"),
    "tokenize.train_on": ("assistant", "last_assistant", "completion", "all"),
    "tokenize.end_token": ("auto", "always", "never"),
    "tokenize.system_role": ("error", "merge"),
    "split.policy": (
        "split",
        "truncate_end",
        "truncate_start",
        "keep_completion",
        "drop",
        "error",
    ),
    "train.fine_tune_type": ("lora", "dora", "full"),
    "train.optimizer": ("adam", "adamw", "sgd", "muon", "adafactor"),
    "train.schedule.name": ("constant", "linear", "cosine"),
    "train.on_nonfinite": ("stop", "skip"),
    "evaluate.split": ("test", "valid"),
    "memory.activation_cache": ("auto", "on", "off"),
    "run.launch.backend": ("ring", "nccl"),
    "run.device": ("auto", "cpu", "gpu"),
}

MOST = 10**9
"""Far beyond any run, and short of where 64 bits end."""

# key: (least, most); None: open. A value of None passes where the key is optional.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "data.shares.train": (0, 1),
    "data.shares.valid": (0, 1),
    "data.shares.test": (0, 1),
    "data.max_leak": (0, 1),
    "data.seed": (0, 2**32 - 1),
    "split.max_seq_length": (2, MOST),
    "split.overlap": (0, MOST),
    "split.max_target_loss": (0, 1),
    "train.num_layers": (-1, MOST),
    "train.lora_parameters.rank": (1, MOST),
    "train.lora_parameters.dropout": (0, 0.999),
    "train.learning_rate": (0, None),
    "train.schedule.warmup": (0, MOST),
    "train.schedule.end": (0, None),
    "train.effective_batch_size": (1, MOST),
    "train.updates": (1, MOST),
    "train.stop_at_update": (1, MOST),
    "train.epochs": (0, MOST),
    "train.seed": (0, 2**32 - 1),
    "train.updates_per_eval": (1, MOST),
    "train.patience": (1, MOST),
    "evaluate.samples": (0, MOST),
    "evaluate.max_new_tokens": (1, MOST),
    "run.updates_per_save": (1, MOST),
    "run.keep_last": (1, MOST),
}
POSITIVE = (
    "train.epochs",
    "train.clip_norm",
    "train.lora_parameters.scale",
    "run.step_timeout_s",
)
TEXT = (
    "model.repo",
    "model.revision",
    "model.path",
    "data.path",
    "tokenize.chat_template",
    "train.initial_adapters",
    "run.report_to",
)
"""Null or a name, never empty: an empty path would mean the project itself."""
AUTO_OR_POSITIVE = ("memory.budget_gb", "memory.activation_cache_limit_gb")
AUTO_OR_ZERO_UP = ("memory.cache_limit_gb", "memory.wired_limit_gb")
AUTO_OR_COUNT = ("memory.batch_size", "memory.grad_accumulation_steps")
AUTO_OFF_OR_COUNT = ("memory.loss_chunk", "memory.attention_block")

HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
"""A name or address that ssh takes, and never one of its options."""


@dataclass(frozen=True)
class Problem:
    """One setting that cannot be used."""

    key: str
    message: str
    found: Any
    expected: str


def problems(settings: Settings) -> list[Problem]:
    """Check every single value and every pair that excludes each other.

    What needs the data or the model is checked by validate, not here.
    """
    return [
        *_choices(settings),
        *_ranges(settings),
        *_names(settings),
        *_memory(settings),
        *_launch(settings),
        *_together(settings),
    ]


def value_of(settings: Settings, key: str) -> Any:
    """The value under a dotted key."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _choices(settings: Settings) -> Iterator[Problem]:
    for key, allowed in CHOICES.items():
        value = value_of(settings, key)
        if value not in allowed:
            yield Problem(key, f"{key} has no such choice", value, "one of " + ", ".join(allowed))


def _ranges(settings: Settings) -> Iterator[Problem]:
    for key, (least, most) in RANGES.items():
        value = value_of(settings, key)
        if value is None:
            continue
        below = least is not None and value < least
        above = most is not None and value > most
        if below or above or not math.isfinite(value):
            said = _range_text(least, None if most == MOST and not above else most)
            yield Problem(key, f"{key} is out of range", value, said)
    for key in POSITIVE:
        value = value_of(settings, key)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield Problem(key, f"{key} must be above 0", value, "above 0, or null")


def _range_text(least: float | None, most: float | None) -> str:
    return f"at least {least}" if most is None else f"{least} to {most}"


def _names(settings: Settings) -> Iterator[Problem]:
    """Text that must not be empty, and the columns of `data.columns`."""
    for key in TEXT:
        value = value_of(settings, key)
        if value is not None and (not value.strip() or "\0" in value):
            yield Problem(key, f"{key} is empty", repr(value), "a name, or null")
    key, columns = "data.columns", settings.data.columns or {}
    expected = "a column's name for each slot, such as {prompt: question, completion: reply}"
    if not all(isinstance(name, str) and name.strip() for name in columns.values()):
        yield Problem(key, f"{key} names no column", columns, expected)
    elif len(set(columns.values())) < len(columns):
        yield Problem(key, f"{key} names one column twice", columns, expected)


def _memory(settings: Settings) -> Iterator[Problem]:
    for key in AUTO_OR_POSITIVE + AUTO_OR_ZERO_UP:
        value = value_of(settings, key)
        least_ok = _is_number(value) and (value > 0 or (key in AUTO_OR_ZERO_UP and value == 0))
        if value != "auto" and not least_ok:
            yield Problem(key, f"{key} must be auto or GB", value, "auto, or GB above 0")
    for key in AUTO_OR_COUNT + AUTO_OFF_OR_COUNT:
        value = value_of(settings, key)
        words = ("auto", "off") if key in AUTO_OFF_OR_COUNT else ("auto",)
        if value not in words and not _is_count(value):
            name = key.rsplit(".", 1)[-1]
            expected = ", ".join(words) + " or a whole number of at least 1"
            yield Problem(key, f"{name} must be at least 1", value, expected)
    value = settings.memory.grad_checkpoint
    if value != "auto" and not isinstance(value, bool) and not _is_count(value):
        key = "memory.grad_checkpoint"
        yield Problem(key, f"{key} is not understood", value, "auto, false, true or every k-th")


def _launch(settings: Settings) -> Iterator[Problem]:
    """`run.launch.hosts` names at least one process."""
    hosts, key = settings.run.launch.hosts, "run.launch.hosts"
    if hosts is None or _is_count(hosts):
        return
    expected = "null, a number of processes of at least 1, or a list of host names"
    if not isinstance(hosts, list | tuple) or not hosts:
        yield Problem(key, f"{key} names no process", hosts, expected)
    elif not all(isinstance(name, str) and HOST.fullmatch(name) for name in hosts):
        yield Problem(key, f"{key} holds what is no host name", hosts, expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _together(settings: Settings) -> Iterator[Problem]:
    train, split, model = settings.train, settings.split, settings.model
    if (train.epochs is None) == (train.updates is None):
        which = "neither is set" if train.updates is None else "both are set"
        found = f"{train.updates}, and train.epochs={train.epochs}"
        message = f"Set either train.updates or train.epochs: {which}"
        yield Problem("train.updates", message, found, "exactly one")
    if train.num_layers == 0:
        key = "train.num_layers"
        yield Problem(key, "train.num_layers=0 trains nothing", 0, "at least 1, or -1 for all")
    if split.overlap >= split.max_seq_length - 1:
        expected = f"at most max_seq_length - 2 = {split.max_seq_length - 2}"
        message = "split.overlap leaves no room for new tokens"
        yield Problem("split.overlap", message, split.overlap, expected)
    if (model.repo is None) == (model.path is None):
        which = "neither is set" if model.repo is None else "both are set"
        found = f"{model.repo}, and model.path={model.path}"
        message = f"Set either model.repo or model.path: {which}"
        yield Problem("model.repo", message, found, "exactly one")
    yield from _hub(settings)
    shares = settings.data.shares
    total = shares.train + shares.valid + shares.test
    if abs(total - 1) > 1e-6 or shares.train == 0:
        found = f"{shares.train} + {shares.valid} + {shares.test} = {total:g}"
        expected = "a sum of 1 with a share for train"
        yield Problem("data.shares", "data.shares do not add up", found, expected)
    yield from _cut(settings)


def _hub(settings: Settings) -> Iterator[Problem]:
    model = settings.model
    hub = model.repo is not None and ":" not in model.repo
    if hub and not model.revision:
        message = "A Hub model needs model.revision, so that everyone trains the same weights"
        yield Problem("model.revision", message, model.revision, "a commit of the repository")


def _cut(settings: Settings) -> Iterator[Problem]:
    """G3: both fixed means their product, times workers, is the effective batch."""
    memory, whole = settings.memory, settings.train.effective_batch_size
    rows, steps = memory.batch_size, memory.grad_accumulation_steps
    if not (_is_count(rows) and _is_count(steps)) or any(_launch(settings)):
        return
    workers = settings.run.launch.workers()
    if rows * steps * workers != whole:
        times = f" × {workers} workers" if workers > 1 else ""
        found = f"{rows} × {steps}{times} = {rows * steps * workers}"
        message = "memory.batch_size × memory.grad_accumulation_steps is not the effective batch"
        yield Problem("memory.batch_size", message, found, f"effective_batch_size={whole}")
