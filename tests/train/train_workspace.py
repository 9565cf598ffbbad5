"""A workspace that the train stage can run in: the tiny model and a few random examples."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.core import files, tables
from stages.core.config import schema

REPOSITORY = Path(__file__).parents[2]
VOCABULARY = 250

TRAIN = {
    "num_layers": 2,
    "lora_parameters": {"rank": 2},
    "learning_rate": 1e-3,
    "effective_batch_size": 4,
    "updates": 8,
    "seed": 3,
}


def make(folder, lengths, valid=(), train=(), seed=0, **groups):
    """Write params.yaml, examples, manifest and validate.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    for split, sizes in (("train", lengths), ("valid", valid)):
        write_examples(folder / f"data/examples/{split}.parquet", sizes, draw)
    write_manifest(folder)
    files.write_json(folder / "reports/validate.json", {"ok": True, "checks": []})
    settings(folder, train, **groups)
    return folder


def settings(folder, train=(), **groups):
    """Write params.yaml."""
    values = {
        "model": {"repo": "builtin:tiny"},
        "train": {**TRAIN, **dict(train)},
        **{name: dict(group) for name, group in groups.items()},
    }
    (folder / "params.yaml").write_text(json.dumps(values))


def write_examples(path, lengths, draw):
    """Random tokens; all but the first three tokens of an example are targets."""
    rows = {
        "example": list(range(len(lengths))),
        "row": [10 + i for i in range(len(lengths))],
        "piece": [0] * len(lengths),
        "tokens": [draw.integers(1, VOCABULARY, n).tolist() for n in lengths],
        "target_mask": [[place >= 3 for place in range(n)] for n in lengths],
    }
    with tables.writing(path, tables.EXAMPLES) as writer:
        writer.write_table(pa.table(rows, schema=tables.EXAMPLES))


def write_manifest(folder):
    """data/model.json of the tiny model, whose weights lie in the repository's own cache."""
    from stages.core.model import models

    manifest = models.build_manifest(schema.Model(repo="builtin:tiny"))
    files.write_json(folder / "data/model.json", manifest.record())


def environment():
    """For a process of its own: our packages, no DVC around it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DVC")}
    return {**kept, "PYTHONPATH": str(REPOSITORY)}


def command(*words):
    """The train stage as a command line."""
    return [sys.executable, "-m", "stages.train", *words]


def checkpoints(folder):
    """Updates that the only run in this workspace has checkpoints of."""
    found = folder.glob(".cache/checkpoints/*/[0-9]*")
    return sorted(int(path.name) for path in found)


def results(folder):
    """What must be equal bit for bit: the adapter's hash and the rows of both result files."""
    return {
        "adapters": files.sha256_file(folder / "adapters/adapters.safetensors"),
        "config": (folder / "adapters/adapter_config.json").read_text(),
        "history": (folder / "reports/train/history.csv").read_text(),
        "valid": (folder / "reports/train/valid.csv").read_text(),
    }
