"""`memory=mlx_lm` beside mlx-lm's own `train()`: batches, losses, weights and peak are equal."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from omegaconf import OmegaConf
from processes import once
from train_workspace import REPOSITORY, environment, make

from stages.core.memory.plan import Plan, from_record
from stages.core.tables import read_examples
from stages.core.update import batching

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("mlx_lm_training.py")
LENGTHS = [478, 60, 470, 30, 230, 410, 20, 475, 330, 85, 440, 420]
"""Rows of an update differ much, so that leaving some out would be seen in the peak."""
TRAIN = {
    "num_layers": -1,
    "updates": 6,
    "learning_rate": 1e-4,
    "schedule": {"name": "constant", "warmup": 0, "end": 0.0},
    "clip_norm": None,
    "effective_batch_size": 4,
}
FIELDS = set(Plan.__dataclass_fields__)


def preset():
    return OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf/memory/mlx_lm.yaml"))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The workspace after our run under the preset, and what mlx-lm's own run told."""
    folder = make(
        tmp_path_factory.mktemp("preset") / "run",
        LENGTHS,
        train=TRAIN,
        split={"max_seq_length": 1024},
        memory=preset(),
    )
    status, said = once(folder)
    assert status == 0, said
    subprocess.run(
        [sys.executable, PROGRAM, "theirs.json"],
        cwd=folder,
        env=environment(),
        check=True,
        capture_output=True,
    )
    return folder, json.loads((folder / "theirs.json").read_text())


def our_shapes(folder):
    """(rows, width) of every micro-batch of the run, under the plan that it recorded."""
    record = json.loads((folder / "reports/train/run.json").read_text())["plan"]
    plan = from_record({key: value for key, value in record.items() if key in FIELDS})
    examples = read_examples(folder / "data/examples/train.parquet")
    return [
        micro.tokens_BT.shape
        for epoch in range(2)
        for ids in batching.effective_batches(len(examples), 4, 3, epoch)
        for micro in batching.micro_batches(examples, ids, plan)
    ]


def test_every_batch_has_its_rows_and_about_its_width(both):
    folder, theirs = both
    ours = our_shapes(folder)
    assert [rows for rows, _ in ours] == [rows for rows, _ in theirs["shapes"]] == [4] * 6
    widths, their_widths = (np.array([w for _, w in x]) for x in (ours, theirs["shapes"]))
    assert all(width % 16 == 0 for width in widths)
    assert all(width % 32 == 0 for width in their_widths)
    assert len(set(widths)) <= 8
    # Of its multiples of 32 ours are the nearer multiples of 16.
    assert set(their_widths - widths) <= {0, 16}


def test_losses_and_weights_are_its_own(both):
    folder, theirs = both
    with open(folder / "reports/train/history.csv") as file:
        ours = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(ours) == 6
    assert ours == pytest.approx(theirs["losses"], rel=1e-5)
    # lora_b starts at zero, so it is the change itself.
    mine = mx.load(str(folder / "adapters/adapters.safetensors"))
    its = mx.load(str(folder / "theirs.safetensors"))
    names = sorted(name for name in its if name.endswith("lora_b"))
    assert mine.keys() == its.keys()
    a, b = (np.concatenate([np.array(x[k], float).ravel() for k in names]) for x in (mine, its))
    assert np.linalg.norm(b) > 1e-3
    assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b)


def test_the_peak_is_its_own(both):
    """Within 5% or 20 MB; a tiny model's peak varies by 8% from run to run."""
    folder, theirs = both
    ours = json.loads((folder / "reports/train/run.json").read_text())["plan"]["measured_peak_gb"]
    assert theirs["peak_gb"] > 0.08
    assert ours == pytest.approx(theirs["peak_gb"], rel=0.05, abs=0.02)


def test_without_the_preset_it_is_far_less(both, tmp_path):
    _, theirs = both
    folder = make(tmp_path / "run", LENGTHS, train=TRAIN, split={"max_seq_length": 1024})
    status, said = once(folder)
    assert status == 0, said
    ours = json.loads((folder / "reports/train/run.json").read_text())["plan"]["measured_peak_gb"]
    assert ours < 0.5 * theirs["peak_gb"]
