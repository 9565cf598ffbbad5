"""mlx-lm's side of a figure: its own `train()`, as its command line calls it.

The timed run is mlx-lm's as it is, one padding token per padded row counted as a target. For the
comparison of losses the same batches are evaluated once more, outside the timed run: by its loss as
it is, which has to give the numbers that the timed run reported, and by its loss with each row's
length one less, which leaves the padding token out and has to give our loss.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx_lm.tuner import trainer
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import CacheDataset

from benchmarks.spec import Spec
from benchmarks.subject import Subject
from stages.core.tables import Examples

AS_TRAINED = {"float32": 1e-3}
AS_TRAINED_COARSE = 1e-2
"""How far the timed run's losses may be from the same loss evaluated again, relative, by type."""


class Rows:
    """Our examples as mlx-lm keeps a file of prompts and completions, which has two keys a row."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> dict[str, int]:
        return {"prompt": i, "completion": i}

    def process(self, row: dict[str, int]) -> tuple[list[int], int]:
        """Tokens, and the index of the first target."""
        tokens, mask = self.examples.example(row["prompt"])
        return tokens.tolist(), int(np.flatnonzero(mask)[0])


class Passes(TrainingCallback):
    """Wall time, loss and peak memory at the end of each pass."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def on_train_loss_report(self, train_info: dict) -> None:
        """Called when a pass is through."""
        self.times.append(time.perf_counter())
        self.losses.append(train_info["train_loss"])
        self.peaks.append(mx.get_peak_memory())
        mx.reset_peak_memory()


class Batches:
    """mlx-lm's own batches, and the shapes that went by."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, **given: Any) -> Iterator[tuple[mx.array, mx.array]]:
        """In place of `trainer.iterate_batches`."""
        for batch, lengths in trainer.iterate_batches(**given):
            self.shapes.append((batch.shape[0], batch.shape[1] - 1))
            yield batch, lengths


def measure(subject: Subject, spec: Spec) -> dict[str, Any]:
    """Seconds, peaks in MB (1e6 bytes) and loss of `spec.passes` passes.

    Raises:
        RuntimeError: The timed run's losses are not those of its loss on the same batches.
    """
    dataset, batches = CacheDataset(Rows(subject.examples)), Batches()
    steps = len(dataset) // spec.rows
    kind = {"adam": optim.Adam, "adamw": optim.AdamW}[subject.settings.train.optimizer]
    weights = mx.get_active_memory()
    np.random.seed(subject.settings.train.seed)  # its order of batches comes from there
    with tempfile.TemporaryDirectory() as folder, quiet():
        mx.reset_peak_memory()
        passes = Passes()
        trainer.train(
            model=subject.model,
            optimizer=kind(learning_rate=subject.settings.train.learning_rate),
            train_dataset=dataset,
            args=trainer.TrainingArgs(
                batch_size=spec.rows,
                iters=spec.passes * steps,
                steps_per_report=steps,
                steps_per_eval=10**9,
                steps_per_save=10**9,
                max_seq_length=spec.cap,
                adapter_file=str(Path(folder) / "adapters.safetensors"),
                grad_checkpoint=spec.grad_checkpoint,
                grad_accumulation_steps=max(1, spec.effective // spec.rows),
            ),
            iterate_batches=batches,
            training_callback=passes,
        )
    seconds = np.diff(passes.times).tolist()
    as_it_is, corrected, targets = losses(subject.model, dataset, spec)
    limit = AS_TRAINED.get(subject.manifest.dtype, AS_TRAINED_COARSE)
    if not math.isclose(passes.losses[0], as_it_is, rel_tol=limit):
        raise RuntimeError(f"mlx-lm reported {passes.losses[0]} for a loss of {as_it_is}")
    return {
        "setup_s": 0.0,
        "first_s": seconds[0],
        "later_s": seconds[1:],
        "loss": corrected,
        "reported_loss": passes.losses[0],
        "targets": targets,
        "peak_mb": max(passes.peaks) / 1e6,
        "later_peak_mb": max(passes.peaks[1:], default=0) / 1e6,
        "weights_mb": weights / 1e6,
        "held_mb": weights / 1e6,
        "above_mb": (max(passes.peaks) - weights) / 1e6,
        "tokens": int(subject.examples.lengths.sum()),
        "padded_tokens": sum(rows * width for rows, width in batches.shapes[:steps]),
        "micro_batches": steps,
        "shapes": len(set(batches.shapes)),
    }


def losses(model: nn.Module, dataset: CacheDataset, spec: Spec) -> tuple[float, float, int]:
    """The mean of its loss over batches, the loss per target without padding, and the targets.

    The second takes logits in float32, as ours does.
    """
    model.eval()
    wide = lambda inputs: model(inputs).astype(mx.float32)
    of_batches, total, targets = [], 0.0, 0
    for batch, lengths in trainer.iterate_batches(dataset, spec.rows, spec.cap):
        of_batches.append(trainer.default_loss(model, batch, lengths)[0].item())
        loss, count = trainer.default_loss(wide, batch, lengths - mx.array([0, 1]))
        total += loss.item() * count.item()
        targets += count.item()
    return float(np.mean(of_batches)), total / targets, targets


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep mlx-lm's own progress off the terminal."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
