"""Updates that learn, on either side, and the losses of what they gave. Needs MLX prepared."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner import trainer
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.datasets import CacheDataset

from benchmarks import ours as our_side
from benchmarks import subject as subjects
from benchmarks import theirs as their_side
from benchmarks.spec import Spec
from benchmarks.subject import Subject
from stages.core.machine.device import Device
from stages.core.memory.rule import by_rule
from stages.core.model.trainable import trained
from stages.core.update.loss import plain_loss
from stages.train import loop


class Kept(TrainingCallback):
    """A clock that stands still while trained arrays are written to a folder."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.subject = subject
        self.folder = folder
        self.curve: list[dict[str, float]] = []
        self.spent = 0.0
        self.started = time.perf_counter()

    def keep(self) -> None:
        """Write the arrays as they are now, beside the seconds spent so far."""
        self.spent += time.perf_counter() - self.started
        update = len(self.curve)
        arrays = trained(self.subject.model)
        mx.save_safetensors(str(self.folder / f"{update:04d}.safetensors"), arrays)
        self.curve.append({"update": update, "seconds": self.spent})
        self.started = time.perf_counter()

    def on_train_loss_report(self, train_info: dict) -> None:
        """Called by mlx-lm after each update."""
        self.keep()


def ours(spec: Spec, chosen: Device, folder: Path) -> dict[str, Any]:
    """Updates of our loop under the plan by rule; `curve`: seconds at each."""
    settings, manifest = subjects.settings_of(spec), subjects.manifest_of(spec)
    lengths = subjects.examples_of(spec).lengths
    plan = by_rule(settings, manifest, lengths, chosen.kind)
    subject = subjects.load(spec, chosen, settings, lazy=plan.activation_cache)
    our_side.forget_activations(subject)
    kept = Kept(subject, folder)
    kept.keep()
    job, state = our_side.prepare(subject, plan, spec)
    setup_s = time.perf_counter() - kept.started
    while state.update < job.last:
        loop.update(job, state)
        kept.keep()
    for store in job.stored.values():
        store.close()
    our_side.forget_activations(subject)
    return {"curve": kept.curve, "setup_s": setup_s, "plan": job.step.plan.record()}


def theirs(spec: Spec, chosen: Device, folder: Path) -> dict[str, Any]:
    """Updates of mlx-lm's `train()`; `curve`: seconds at each."""
    settings = subjects.settings_of(spec)
    subject = subjects.load(spec, chosen, settings, lazy=False)
    dataset = CacheDataset(their_side.Rows(subject.examples))
    micro_batches = max(1, spec.effective // spec.rows)
    np.random.seed(settings.train.seed)
    kind = {"adam": optim.Adam, "adamw": optim.AdamW}[settings.train.optimizer]
    kept = Kept(subject, folder)
    kept.keep()
    with tempfile.TemporaryDirectory() as aside, their_side.quiet():
        trainer.train(
            model=subject.model,
            optimizer=kind(learning_rate=settings.train.learning_rate),
            train_dataset=dataset,
            args=trainer.TrainingArgs(
                batch_size=spec.rows,
                iters=spec.passes * (len(dataset) // spec.rows),
                steps_per_report=micro_batches,
                steps_per_eval=10**9,
                steps_per_save=10**9,
                max_seq_length=spec.cap,
                adapter_file=str(Path(aside) / "adapters.safetensors"),
                grad_accumulation_steps=micro_batches,
            ),
            training_callback=kept,
        )
    return {"curve": kept.curve, "setup_s": 0.0}


def losses(spec: Spec, chosen: Device, folders: Mapping[str, str]) -> dict[str, list[float]]:
    """The loss per target over the spec's examples, with every set of arrays in each folder.

    Each example alone, through the whole model and all its logits.
    """
    subject = subjects.load(spec, chosen, subjects.settings_of(spec), lazy=False)
    subject.model.eval()
    found = {}
    for name, folder in folders.items():
        found[name] = []
        for file in sorted(Path(folder).glob("*.safetensors")):
            subject.model.update(tree_unflatten(list(mx.load(str(file)).items())))
            found[name].append(loss(subject))
    return found


def loss(subject: Subject) -> float:
    """Per target, nats, float32."""
    total = 0.0
    for i in range(len(subject.examples)):
        tokens, mask = (mx.array(x)[None] for x in subject.examples.example(i))
        total += plain_loss(subject.model(tokens), tokens, mask, 1.0).item()
    return total / int(subject.examples.targets.sum())
