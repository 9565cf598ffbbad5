"""The keys of `mlx_lm.lora`: their defaults, their older names, and the flags that set them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf

from stages.core.config.settings import nearest
from stages.core.errors import UserError

VERSION = "0.32.2"
DEFAULTS: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6b",
    "train": False,
    "fine_tune_type": "lora",
    "optimizer": "adam",
    "optimizer_config": {},
    "data": "mlx-community/WikiSQL",
    "seed": 0,
    "num_layers": 16,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "resume_adapter_file": None,
    "adapter_path": "adapters",
    "save_every": 100,
    "test": False,
    "test_batches": 500,
    "max_seq_length": 2048,
    "config": None,
    "grad_checkpoint": False,
    "grad_accumulation_steps": 1,
    "clear_cache_threshold": 0,
    "lr_schedule": None,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": False,
    "report_to": None,
    "project_name": None,
    "trust_remote_code": False,
}
"""`mlx_lm.lora.CONFIG_DEFAULTS` of this version; what a configuration leaves out means these."""
FEATURES = {
    "text_feature": "text",
    "prompt_feature": "prompt",
    "completion_feature": "completion",
    "chat_feature": "messages",
}
"""Keys that `mlx_lm.tuner.datasets` looks for, and our slots of `data.columns`."""
OLD = {"lora_layers": "num_layers", "adapter_file": "adapter_path", "use_dora": "fine_tune_type"}
"""Names of 2024, and what they are called now."""
KNOWN = (*DEFAULTS, *FEATURES, "hf_dataset")
SWITCHES = ("train", "test", "mask_prompt", "grad_checkpoint", "trust_remote_code", "use_dora")
FILE_ONLY = ("optimizer_config", "lr_schedule", "lora_parameters", "hf_dataset", *FEATURES)
SHORT = {"-c": "config"}


def from_flags(words: Sequence[str]) -> dict[str, Any]:
    """The keys that flags set; a command's own words before the first flag are skipped.

    Raises:
        UserError: A flag is unknown, lacks its value, or a word belongs to no flag.
    """
    found: dict[str, Any] = {}
    waiting = list(words)
    while waiting and (waiting[0] == "-m" or not waiting[0].startswith("-")):
        waiting.pop(0)  # python -m mlx_lm lora
    names = [key for key in (*KNOWN, *OLD) if key not in FILE_ONLY]
    while waiting:
        word, sign, value = waiting.pop(0).partition("=")
        key = _flag(word, names)
        if key in SWITCHES:
            found[key] = True
            continue
        if not sign:
            if not waiting or waiting[0].startswith("--"):
                raise _bad_flag(word, "no value", f"{word} VALUE")
            value = waiting.pop(0)
        found[key] = value if key in ("model", "data", "config") else parsed(value)
    return found


def _flag(word: str, names: Sequence[str]) -> str:
    """The key a flag sets; the start of a flag will do if it fits one only, as in mlx-lm."""
    key = SHORT.get(word) or word.removeprefix("--").replace("-", "_")
    if key in names:
        return key
    close = [name for name in names if name.startswith(key)] if word.startswith("--") else []
    if len(close) == 1:
        return close[0]
    best = close[0] if close else nearest(key, names)
    raise _bad_flag(word, word, f"nearest: --{best.replace('_', '-')}" if best else "--help")


def _bad_flag(word: str, found: str, expected: str) -> UserError:
    return UserError(
        f"{word} is no flag of mlx_lm.lora" if found == word else f"{word} is not complete",
        where="the flags",
        found=found,
        expected=expected,
    )


def parsed(value: str) -> Any:
    """A flag's value as YAML reads it, numbers as in the file."""
    try:
        return OmegaConf.create(f"value: {value}")["value"]
    except yaml.YAMLError:
        return value
