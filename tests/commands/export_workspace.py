"""A folder as after `dvc repro`, by hand: a small model, test rows, an adapter, its card."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pyarrow as pa
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.utils import load_model, save_config, save_model

from stages.core import files, tables
from stages.core.config import schema
from stages.core.model import models
from stages.core.update import adapters

TINY = schema.Model(repo="builtin:tiny", dtype="float32")
CARD = """---
base_model: tiny
library_name: mlx
tags:
- mlx
- lora
---

# The card

## Use

With the adapter.

## Training

How it was trained.
"""


def make(folder: Path, model=TINY, size=0.05, rows=4, **train) -> Path:
    """Write everything into `folder` (the current directory); returns the base model's folder."""
    manifest = models.build_manifest(model)
    files.write_json(folder / "data/model.json", manifest.record())
    draw = np.random.default_rng(0)
    for split, count in (("train", 1), ("valid", 1), ("test", rows)):
        write_examples(
            folder / f"data/examples/{split}.parquet", [12 + i for i in range(count)], draw
        )
    shape = schema.Train(**{"num_layers": 2, "updates": 3, **train})
    params = {"model": vars(model), "train": {"updates": 3}}
    (folder / "params.yaml").write_text(json.dumps(params))
    (folder / "reports").mkdir()
    (folder / "reports/card.md").write_text(CARD)
    place = models.folder(manifest, model)
    write_adapter(folder / "adapters", place, model, manifest, shape, size)
    return place


def write_examples(path, lengths, draw):
    """Random bytes; from the fourth token on each is a target."""
    rows = {
        "example": list(range(len(lengths))),
        "row": list(range(len(lengths))),
        "piece": [0] * len(lengths),
        "tokens": [draw.integers(1, 250, n).tolist() for n in lengths],
        "target_mask": [[place >= 3 for place in range(n)] for n in lengths],
    }
    with tables.writing(path, tables.EXAMPLES) as writer:
        writer.write_table(pa.table(rows, schema=tables.EXAMPLES))


def write_adapter(folder, place, model, manifest, shape, size):
    """Initial values plus noise of the given size, as training would have moved them."""
    loaded, _ = models.load_model(place, model.dtype)
    adapters.attach(loaded, shape)
    draw = np.random.default_rng(1)
    weights = {
        name: (value + mx.array(draw.normal(0, size, value.shape))).astype(value.dtype)
        for name, value in sorted(adapters.trained(loaded).items())
    }
    adapters.save(folder, weights, manifest, shape)


def quantized(folder: Path, bits=4) -> schema.Model:
    """builtin:tiny quantized by MLX, as a folder of the user's."""
    source = models.folder(models.build_manifest(TINY), TINY)
    loaded, config = load_model(source)
    nn.quantize(loaded, group_size=32, bits=bits)
    config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True)
    save_model(folder, loaded)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    return schema.Model(path=folder.name)


def rows():
    """Tokens of the test rows, straight from the table."""
    table = tables.read_examples(Path("data/examples/test.parquet"))
    return [table.example(i)[0] for i in range(len(table))]


def logits(folder, adapter=None, dtype=None):
    """Logits (N, V) at the targets by mlx-lm's own loaders, in float64."""
    model, _ = load(str(folder), adapter_path=None if adapter is None else str(adapter))
    if dtype is not None:
        model.load_weights([(n, x.astype(dtype)) for n, x in tree_flatten(model.parameters())])
    found = [np.array(model(mx.array(row)[None])[0, 2:-1].astype(mx.float32)) for row in rows()]
    return np.concatenate(found).astype(np.float64)


def loss(logits_NV):
    """Mean cross entropy over the targets of the test rows, in NumPy."""
    labels = np.concatenate([row[3:] for row in rows()])
    shifted = logits_NV - logits_NV.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[range(len(labels)), labels]))
