"""A pipeline's folder up to training, made by hand around the tiny model."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pyarrow as pa

from stages.core import files, tables
from stages.core.config import schema
from stages.core.model import models
from stages.core.model.tokenizers import load_tokenizer
from stages.core.update import adapters

TINY = schema.Model(repo="builtin:tiny", dtype="float32")
CHATS = [
    ("What is red?", "A colour."),
    ("Two and two?", "Four."),
    ("Answer as JSON.", '{"ok": true}'),
    ("What is the capital of France, in one word?", "Paris" * 12),
]


def settings(**evaluate) -> schema.Settings:
    """Settings of the tiny model with two LoRA layers."""
    train = schema.Train(num_layers=2, updates=3, lora_parameters=schema.LoraParameters(rank=4))
    return schema.Settings(
        model=TINY, train=train, evaluate=schema.Evaluate(max_new_tokens=6, **evaluate)
    )


def make(folder: Path, leaked: bool = False, splits=("test",)) -> Path:
    """Write data/, adapters/ and reports/collect.json into `folder`; returns the model's folder."""
    manifest = models.build_manifest(TINY)
    files.write_json(folder / "data/model.json", manifest.record())
    model_folder = models.folder(manifest, TINY)
    tokenizer = load_tokenizer(model_folder)
    records = [{"prompt": prompt, "completion": answer} for prompt, answer in CHATS]
    train = records[:1] if leaked else [{"prompt": "other", "completion": "row"}]
    write_raw(folder / "data/raw/train.parquet", train)
    for split in ("valid", "test"):
        kept = records if split in splits else []
        write_raw(folder / f"data/raw/{split}.parquet", kept)
        write_examples(folder / f"data/examples/{split}.parquet", kept, tokenizer)
    files.write_json(folder / "reports/collect.json", {"leaked_rows": {"test": int(leaked)}})
    write_adapter(folder / "adapters", model_folder, manifest)
    return model_folder


def write_raw(path: Path, records) -> None:
    n = len(records)
    columns = [list(range(n)), list(range(1, n + 1)), ["a.jsonl"] * n, ["completion"] * n]
    columns.append([json.dumps(record) for record in records])
    with tables.writing(path, tables.RAW) as writer:
        writer.write_table(pa.table(columns, schema=tables.RAW))


def tokenized(tokenizer, record):
    """Tokens and mask of one completion, by transformers' own way to render a chat."""
    turns = [{"role": "user", "content": record["prompt"]}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    turns.append({"role": "assistant", "content": record["completion"]})
    whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert whole[: len(prompt)] == prompt
    return whole, [i >= len(prompt) for i in range(len(whole))]


def write_examples(path: Path, records, tokenizer) -> None:
    """The last row, the longest one, comes in two pieces."""
    rows = [tokenized(tokenizer, record) for record in records]
    parts = [(row, 0, *rows[row]) for row in range(len(rows))]
    if parts:
        row, _, tokens, mask = parts.pop()
        parts += [(row, 0, tokens[:100], mask[:100]), (row, 1, tokens[100:], mask[100:])]
    columns = [list(range(len(parts))), *([part[i] for part in parts] for i in range(4))]
    with tables.writing(path, tables.EXAMPLES) as writer:
        writer.write_table(pa.table(columns, schema=tables.EXAMPLES))


def write_adapter(folder: Path, model_folder: Path, manifest) -> None:
    model, _ = models.load_model(model_folder, "float32")
    train = settings().train
    adapters.attach(model, train)
    noise = np.random.default_rng(1)
    weights = {
        name: value + mx.array(noise.normal(0, 0.05, value.shape), mx.float32)
        for name, value in adapters.trained(model).items()
    }
    adapters.save(folder, weights, manifest, train)
