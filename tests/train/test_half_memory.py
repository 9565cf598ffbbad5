"""Half the memory that mlx-lm's own `train()` takes, and the same weights as without a budget.

Activations dominate: rows of 400 to 800 tokens on the tiny model, whose weights take 1 MB.
"""

import json
import random
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest

from stages.core.config.settings import load_settings
from stages.core.model import models
from stages.core.model.manifest import read_manifest
from stages.core.model.trainable import attach, trained
from tests import project as projects

pytestmark = pytest.mark.slow

PROGRAM = projects.ROOT / "tests/train/mlx_lm_training.py"
SETTINGS = (
    "model=tiny",
    "data=files",
    "train.num_layers=3",
    "train.updates=10",
    "train.updates_per_eval=null",
    "train.learning_rate=1e-4",
    "train.effective_batch_size=8",
)
TOLERANCE = 1e-4
"""Of the weight change, in float32 (docs/memory.md: within rounding)."""


def write_rows(folder):
    """Random letters: the tiny model has a token for each byte."""
    draw = random.Random(1)
    folder.mkdir(parents=True)
    for split, count in (("train", 24), ("valid", 2), ("test", 2)):
        lengths = [draw.randint(400, 800) for _ in range(count)]
        rows = [{"text": "".join(draw.choices("abcdefgh ", k=n))} for n in lengths]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))


def train(project, kept, *words):
    """Run the train stage; keeps its adapter and returns its plan."""
    project.run(sys.executable, "-m", "stages.train", *words, timeout=900)
    shutil.copy(project.folder / "adapters/adapters.safetensors", kept)
    return project.json("reports/train/run.json")["plan"]


def weight_bytes(project):
    """Bytes of the model's weights."""
    return project.json("data/model.json")["bytes"]


def initial(project, monkeypatch):
    """The trained arrays before the first update."""
    monkeypatch.chdir(project.folder)
    settings = load_settings()
    model, _ = models.load_model(models.folder(read_manifest(), settings.model), "float32")
    attach(model, settings.train)
    return trained(model)


def apart(a, b, start):
    """‖a − b‖ / ‖b − start‖ over all trained arrays, in float64."""
    assert a.keys() == b.keys() == start.keys()
    flat = lambda x: np.concatenate([np.array(x[k], np.float64).ravel() for k in sorted(x)])
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b) - flat(start))


def test_half_of_what_mlx_lm_needs_gives_the_same_weights(tmp_path, monkeypatch):
    project = projects.make(tmp_path / "project", tmp_path / "home", commit=False)
    write_rows(project.folder / "data/source/long")
    project.run(sys.executable, "-m", "stages.compose", *SETTINGS)
    for stage in ("collect", "model", "tokenize", "split", "validate"):
        project.run(sys.executable, "-m", f"stages.{stage}")

    project.run("env", f"PYTHONPATH={project.folder}", sys.executable, str(PROGRAM), "theirs.json")
    theirs = project.json("theirs.json")
    assert len(theirs["losses"]) == 10 * 8 / 4
    needed = theirs["peak_gb"]
    assert needed > 20 * weight_bytes(project) / 1e9

    free = train(project, tmp_path / "free.safetensors")
    half = train(project, tmp_path / "half.safetensors", f"memory.budget_gb={needed / 2}")
    theirs_way = [f"memory.{key}=off" for key in ("loss_chunk", "attention_block")]
    whole = train(
        project,
        tmp_path / "whole.safetensors",
        *theirs_way,
        "memory.batch_size=4",
        "memory.activation_cache=off",
        "memory.grad_checkpoint=false",
    )

    assert half["predicted_peak_gb"] < needed / 2
    assert half["measured_peak_gb"] < needed / 2
    # The budget means something: cut as mlx-lm does, the same run takes more.
    assert whole["measured_peak_gb"] > needed / 2
    cut = lambda plan: [plan[x] for x in ("batch_size", "batch_tokens", "loss_chunk")]
    assert cut(half) != cut(free)
    assert cut(half) != cut(whole)

    start = initial(project, monkeypatch)
    arrays = {x: mx.load(str(tmp_path / f"{x}.safetensors")) for x in ("free", "half", "whole")}
    assert apart(arrays["half"], arrays["free"], start) < TOLERANCE
    assert apart(arrays["whole"], arrays["free"], start) < TOLERANCE
