"""A small run that has nothing wrong; each test spoils one thing."""

import json
from dataclasses import replace

import pyarrow as pa

from stages.core import tables
from stages.core.config.schema import Settings
from stages.core.model.manifest import Manifest, Source

KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
MANIFEST = Manifest(
    name="tiny",
    source=Source("builtin", "builtin:tiny"),
    files={},
    model_type="llama",
    num_layers=4,
    hidden_size=32,
    vocab_size=260,
    embedding_rows=260,
    dtype="float32",
    quantization=None,
    tied=True,
    max_positions=128,
    parameters=260 * 32 + 4 * 4096,
    bytes=4,
    layer_keys=KEYS,
    outer_keys=["lm_head"],
    eos_token_ids=[2],
    has_chat_template=True,
    system_role=True,
)


def settings(**train):
    made = Settings()
    made.model.repo = "builtin:tiny"
    made.train.updates = 10
    made.train.num_layers = 2
    for name, value in train.items():
        setattr(made.train, name, value)
    return made


def collect_report(**changes):
    split = {"rows_in": 20, "rows_out": 20, "rejected": [], "duplicate_rows": 0, "duplicates": []}
    splits = {name: dict(split) for name in tables.SPLITS}
    return {"splits": splits, "leaks": [], "leaked_rows": {"valid": 0, "test": 0}, **changes}


def tokenize_report():
    form = {"rows": 20, "tokens": 80, "targets": 60, "ends_in_target": 1.0}
    split = {
        "rows_in": 20,
        "rows_out": 20,
        "rejected": [],
        "forms": {"text": form},
        "template_tags": {"rows": 0, "examples": {}},
    }
    return {
        "end_token": "auto",
        "splits": {name: json.loads(json.dumps(split)) for name in tables.SPLITS},
    }


def split_report():
    split = {
        "rows_in": 20,
        "rejected": [],
        "targets": 60,
        "targets_lost": 0,
        "end_tokens_lost": 0,
        "rows_truncated": 0,
        "rows_dropped": 0,
    }
    return {"splits": {name: dict(split) for name in tables.SPLITS}}


def write(folder, manifest=MANIFEST, reports=None, token=5, **counts):
    """Write data/ and reports/ of a run; `counts` are examples per split of 4 tokens each."""
    counts = {"train": 20, "valid": 9, "test": 9, **counts}
    for name, count in counts.items():
        columns = {
            "example": list(range(count)),
            "row": list(range(count)),
            "piece": [0] * count,
            "tokens": [[token, 1, 2, 3]] * count,
            "target_mask": [[False, True, True, True]] * count,
        }
        with tables.writing(folder / f"data/examples/{name}.parquet", tables.EXAMPLES) as writer:
            writer.write_table(pa.table(columns, tables.EXAMPLES))
    (folder / "reports").mkdir(exist_ok=True)
    written = {
        "collect": collect_report(),
        "tokenize": tokenize_report(),
        "split": split_report(),
        **(reports or {}),
    }
    for name, report in written.items():
        (folder / f"reports/{name}.json").write_text(json.dumps(report))
    (folder / "data/model.json").write_text(json.dumps(manifest.record()))


def manifest(**changes):
    return replace(MANIFEST, **changes)
