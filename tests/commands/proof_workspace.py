"""A workspace for `prove`: a small random model, saved as a folder, and a few random examples."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pyarrow as pa
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.utils import save_model

from stages.core import files, tables
from stages.core.config import schema
from stages.core.model import models, tiny

VOCABULARY = tiny.VOCABULARY
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# name -> (module of mlx_lm.models, what differs from BASE, bits or None)
MODELS = {
    "llama": ("llama", {}, None),
    "qwen3": ("qwen3", {}, None),
    "gemma2": ("gemma2", {}, None),
    "experts": ("qwen3_moe", EXPERTS, None),
    "4-bit": ("llama", {}, 4),
}
LENGTHS = [30, 9, 44, 21, 60, 37, 15, 52, 26, 70, 12]


def make(folder, model="llama", valid=(14, 40), dtype="stored", **train):
    """Write model, data/model.json, data/examples and params.yaml; `train` are fields of it."""
    save(folder / "model", model)
    wanted = schema.Model(path="model", dtype=dtype)
    files.write_json(folder / "data/model.json", models.build_manifest(wanted).record())
    draw = np.random.default_rng(0)
    for split, sizes in (("train", LENGTHS), ("valid", valid)):
        write_examples(folder / f"data/examples/{split}.parquet", sizes, draw)
    settings(folder, dtype, **train)


def settings(folder, dtype="stored", **train):
    """Write params.yaml."""
    given = {"num_layers": 2, "effective_batch_size": 4, "updates": 8, "learning_rate": 1e-4}
    values = {"model": {"path": "model", "dtype": dtype}, "train": {**given, **train}}
    (folder / "params.yaml").write_text(json.dumps(values))


def save(folder: Path, name: str) -> None:
    """A random float32 model of mlx-lm's own class, with the tokenizer of builtin:tiny."""
    kind, own, bits = MODELS[name]
    config = {**BASE, **own, "model_type": kind}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda x: x + 0.05 * mx.random.normal(x.shape), model.parameters()))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True)
    save_model(folder, model)
    files.write_json(folder / "config.json", {**config, "eos_token_id": 258})
    files.write_json(folder / "tokenizer.json", tiny.tokenizer())
    files.write_json(folder / "tokenizer_config.json", tiny.tokenizer_config())


def write_examples(path, lengths, draw):
    """Random tokens; two ranges of targets in each, as in a chat of two turns."""
    masks = [[3 <= i < n // 2 or i > n // 2 + 1 for i in range(n)] for n in lengths]
    rows = {
        "example": list(range(len(lengths))),
        "row": [10 + i for i in range(len(lengths))],
        "piece": [0] * len(lengths),
        "tokens": [draw.integers(1, VOCABULARY, n).tolist() for n in lengths],
        "target_mask": masks,
    }
    with tables.writing(path, tables.EXAMPLES) as writer:
        writer.write_table(pa.table(rows, schema=tables.EXAMPLES))
