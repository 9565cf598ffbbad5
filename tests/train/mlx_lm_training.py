"""mlx-lm's own `train()` in a process of its own, on the workspace's model, rows and updates.

    python tests/train/mlx_lm_training.py RESULT     in a workspace with params.yaml and data/

Its loop, loss, compiled step and padding. Batches have the rows of our updates, `memory.batch_size`
at a time, so that both sides see the same ones; each goes through its `iterate_batches`, which pads
it. Its loss counts one padding token per padded row as a target: the lengths it is given are one
less, which leaves that token out and changes nothing else.

RESULT is JSON: `shapes` (rows, padded length of the inputs), `losses`, `peak_gb` of all updates.
"""

import json
import sys
from pathlib import Path

from stages.core.machine import device

device.prepare("cpu")

import mlx.core as mx  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx_lm.tuner import trainer  # noqa: E402
from mlx_lm.tuner.callbacks import TrainingCallback  # noqa: E402

from stages.core.config.settings import load_settings  # noqa: E402
from stages.core.model import models  # noqa: E402
from stages.core.model.manifest import read_manifest  # noqa: E402
from stages.core.model.trainable import attach  # noqa: E402
from stages.core.tables import read_examples  # noqa: E402
from stages.core.update import batching  # noqa: E402


class Told(TrainingCallback):
    """The loss of every step, and the highest peak."""

    def __init__(self):
        self.losses = []

    def on_train_loss_report(self, train_info):
        self.losses.append(train_info["train_loss"])


def padded(examples, settings, rows, shapes):
    """Its batches of our updates, for ever."""
    train, epoch = settings.train, 0
    while True:
        size = train.effective_batch_size
        for ids in batching.effective_batches(len(examples), size, train.seed, epoch):
            for start in range(0, len(ids), rows):
                given = [examples.example(i) for i in ids[start : start + rows]]
                pairs = [(tokens.tolist(), int(mask.argmax())) for tokens, mask in given]
                batch, lengths = next(
                    trainer.iterate_batches(pairs, rows, settings.split.max_seq_length)
                )
                shapes.append((batch.shape[0], batch.shape[1] - 1))
                yield batch, lengths - mx.array([0, 1])
        epoch += 1


def main(result):
    settings, manifest = load_settings(), read_manifest()
    examples = read_examples(Path("data/examples/train.parquet"))
    model, _ = models.load_model(models.folder(manifest, settings.model), settings.model.dtype)
    attach(model, settings.train)
    mx.eval(model.parameters())
    rows = settings.memory.batch_size if settings.memory.batch_size != "auto" else 4
    steps = settings.train.effective_batch_size // rows
    shapes, told = [], Told()
    mx.reset_peak_memory()
    trainer.train(
        model=model,
        optimizer=optim.AdamW(learning_rate=settings.train.learning_rate),
        train_dataset=[],
        args=trainer.TrainingArgs(
            batch_size=rows,
            iters=settings.train.updates * steps,
            steps_per_report=1,
            steps_per_save=10**9,
            max_seq_length=settings.split.max_seq_length,
            grad_accumulation_steps=steps,
            adapter_file="theirs.safetensors",
        ),
        iterate_batches=lambda **_: padded(examples, settings, rows, shapes),
        training_callback=told,
    )
    record = {"shapes": shapes, "losses": told.losses, "peak_gb": mx.get_peak_memory() / 1e9}
    Path(result).write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])
