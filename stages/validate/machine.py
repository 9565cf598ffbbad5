"""What depends on this machine: told, and refused where it must be, but stored in no report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stages.core import files
from stages.core.config.schema import Settings
from stages.core.model.manifest import Manifest
from stages.validate.check import ERROR, WARNING, Check

SLOTS = {"adam": 2, "adamw": 2, "sgd": 1, "muon": 1, "adafactor": 1}
"""Arrays an optimizer keeps per trained number, at most."""
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
SPARE_GB = 0.5
"""Left free for everything else."""


def checks(manifest: Manifest, settings: Settings, checkpoints: Path) -> Iterator[Check]:
    """All checks of the machine."""
    yield disk(manifest, settings, checkpoints)
    yield micro_batches(settings)
    yield slow_type(manifest, settings)


def trained_parameters(manifest: Manifest, settings: Settings) -> int:
    """The most numbers a run can train, from the manifest alone.

    A linear layer of a transformer has the hidden size H on one of its sides. Its other side is
    then P/H for P weights, so rank r adds r (H + P/H), and a layer of K modules with P weights in
    all r (K H + P/H): exact for all modules, too much for a choice of them.
    """
    train = settings.train
    hidden = manifest.hidden_size
    outside = manifest.embedding_rows * hidden * (1 if manifest.tied else 2)
    layer = max(0, manifest.parameters - outside) / manifest.num_layers
    count = manifest.num_layers if train.num_layers == -1 else train.num_layers
    count = min(count, manifest.num_layers)
    if train.fine_tune_type == "full":
        return round(count * layer)
    keys = train.lora_parameters.keys or manifest.layer_keys
    inside = [key for key in keys if key in manifest.layer_keys]
    per_layer = train.lora_parameters.rank * (len(inside) * hidden + layer / hidden)
    if train.fine_tune_type == "dora":
        per_layer += layer / hidden + len(inside) * hidden
    outer = (len(keys) - len(inside)) * (manifest.embedding_rows + hidden)
    return round(count * per_layer + train.lora_parameters.rank * outer)


def checkpoint_gb(manifest: Manifest, settings: Settings) -> float:
    """Disk that a run's checkpoints take at most, in GB.

    `run.keep_last` checkpoints and the one being written, each with weights and optimizer state
    (float32), and the best weights twice: the former best goes once the new one is written.
    """
    train = settings.train
    numbers = trained_parameters(manifest, settings)
    width = WIDTH.get(manifest.dtype, 4) if train.fine_tune_type == "full" else 4
    one = numbers * (width + 4 * SLOTS[train.optimizer])
    return ((settings.run.keep_last + 1) * one + 3 * numbers * width) / 1e9


def disk(manifest: Manifest, settings: Settings, checkpoints: Path) -> Check:
    """M7: predicted disk use is told, and refused when it does not fit."""
    needed, free = checkpoint_gb(manifest, settings), files.free_gb(checkpoints)
    if needed + SPARE_GB <= free:
        message = f"checkpoints take up to {needed:.2f} GB of {free:.1f} GB free"
        return Check("disk", message=message, found=f"{needed:.2f} GB")
    return Check(
        "disk",
        ERROR,
        "the checkpoints of this run do not fit on the disk",
        found=f"{free:.2f} GB free at {checkpoints}",
        expected=f"{needed:.2f} GB for checkpoints and {SPARE_GB} GB to spare",
        fix="free some space (`make clean-cache`), lower run.keep_last, or train fewer layers",
    )


def workers(settings: Settings) -> int:
    """Processes of one run."""
    return settings.run.launch.workers()


def micro_batches(settings: Settings) -> Check:
    """G3: the effective batch can be cut as asked; both numbers fixed are checked with settings."""
    whole, name = settings.train.effective_batch_size, "micro_batches"
    rows, steps = settings.memory.batch_size, settings.memory.grad_accumulation_steps
    least = workers(settings) * (1 if steps == "auto" else int(steps))
    if least > whole:
        return Check(
            name,
            ERROR,
            "the effective batch has fewer examples than workers times accumulation steps",
            found=f"{workers(settings)} workers × {steps} steps, "
            f"train.effective_batch_size={whole}",
            expected=f"at most {whole} micro-batches an update",
            fix="lower run.launch.hosts or memory.grad_accumulation_steps",
        )
    if rows != "auto" and rows > whole:
        message = "memory.batch_size is more than the effective batch: one micro-batch an update"
        return Check(name, WARNING, message, rows, f"at most {whole}")
    return Check(name)


def slow_type(manifest: Manifest, settings: Settings) -> Check:
    """bfloat16 and quantized products have no fast code on a CPU: the factor, measured here."""
    slow = manifest.quantization is not None or manifest.dtype != "float32"
    if not slow:
        return Check("slow_type")
    from stages.validate.products import slowdown

    factor = slowdown(manifest, settings.run.device)
    if factor is None or factor < 1.5:
        return Check("slow_type")
    packed = manifest.quantization
    kind = f"{packed['bits']}-bit" if packed else manifest.dtype
    return Check(
        "slow_type",
        WARNING,
        f"{kind} products are {factor:.0f} times slower than float32 ones on this CPU",
        found=kind,
        expected="float32 on a CPU",
        fix="choose an unquantized model with model.dtype=float32"
        if packed
        else "set model.dtype=float32 (part of the run's identity, so it is never set for you)",
    )
