"""How much the activation cache takes, how much it may take, and whether a run wants it. No MLX."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from stages.core import files, paths
from stages.core.config.settings import Settings
from stages.core.model.manifest import Manifest
from stages.core.update import batching

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RESERVE_GB = 1.0
"""Left free on the disk, for checkpoints and all else."""


def predicted_gb(manifest: Manifest, lengths: np.ndarray, streams: int = 1) -> float:
    """Size on disk in GB (1e9 bytes) of the hidden states of these examples, without padding.

    What layers share beside the hidden states (gemma4, hunyuan, rwkv7) comes on top; `prepare`
    knows it from the model itself.

    Args:
        manifest: `hidden_size` and `dtype` are used.
        lengths: Tokens of each example, (N,), all splits together.
        streams: Hidden states per token; 1 but for a few architectures.
    """
    per_token = manifest.hidden_size * BYTES[manifest.dtype] * streams
    return per_token * int(np.sum(lengths, dtype=np.int64)) / 1e9


def used_gb(folder: Path | None = None) -> float:
    """What all activations in `.cache/activations` take now, in GB."""
    return bytes_in(folder or paths.cache("activations")) / 1e9


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder that others may write in or remove meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def told(size: int) -> str:
    """A number of bytes for people, in GB down to a thousandth."""
    return f"{size / 1e9:.3g} GB" if size >= 1_000_000 else "under 0.001 GB"


def limit_gb(setting: Any) -> float:
    """`memory.activation_cache_limit_gb`; `auto` is half of what is free or taken by it."""
    if setting != "auto":
        return float(setting)
    return (files.free_gb(paths.cache("activations")) + used_gb()) / 2


def wanted(settings: Settings, manifest: Manifest, lengths: np.ndarray) -> bool:
    """Whether a plan made without measuring turns the cache on.

    `on` and `off` stand. `auto` wants frozen layers, room on the disk, and a run that sees at least
    as many examples as the cache would hold: a shorter one would compute more than it reads.

    Args:
        lengths: Tokens of each example of the splits that it will hold, (N,), N at least 1.
    """
    choice, train = settings.memory.activation_cache, settings.train
    if choice != "auto":
        return choice == "on"
    if not 0 < train.num_layers < manifest.num_layers:
        return False
    batch = train.effective_batch_size
    updates = batching.updates_in_run(len(lengths), batch, train.epochs, train.updates)
    if min(updates, train.stop_at_update or updates) * batch < len(lengths):
        return False
    need = predicted_gb(manifest, lengths)
    room = files.free_gb(paths.cache("activations")) - RESERVE_GB
    return need <= min(room, limit_gb(settings.memory.activation_cache_limit_gb))
