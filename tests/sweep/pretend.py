"""A stand-in for training: a loss worked out from the settings, in a tenth of a second.

`train.seed` asks for what a test wants: 13 fails as a stage does that refuses its input; 14 writes
a large file; from 100 on training lasts until the file .cache/go exists, and a signal leaves a
checkpoint.
"""

import json
import math
import signal
import sys
import time
from pathlib import Path

import yaml

from stages.core import entry, files, paths
from stages.core.errors import UserError

TRAIN, METRICS = Path("reports/train"), Path("reports/evaluate/metrics.json")
BASE = 6.0
LARGE = 64_000_000


def loss(rate, layers):
    """Lowest at a rate of 1e-3; each doubling of the layers takes 0.1 off."""
    return 2 + (math.log10(rate) + 3) ** 2 - 0.1 * math.log2(layers)


def train():
    values = yaml.safe_load(Path("params.yaml").read_text())["train"]
    seed, rate = values["seed"], float(values["learning_rate"])
    if seed == 13:
        raise UserError("This seed is unlucky", where="train.seed", found=13, fix="take another")
    if seed == 14:
        with files.replacing(paths.cache() / "large") as place:
            place.write_bytes(bytes(LARGE))
    if seed >= 100:
        wait(paths.cache() / f"pretend-{seed}")
    TRAIN.mkdir(parents=True, exist_ok=True)
    result = {"loss": loss(rate, values["num_layers"]), "plan": {"measured_peak_gb": 0.5}}
    (TRAIN / "run.json").write_text(json.dumps(result))
    (TRAIN / "run.csv").write_text("update,seconds\n1,0.25\n2,0.5\n")


def wait(checkpoint):
    if checkpoint.exists():
        print(f"resumed from {checkpoint.read_text()}", flush=True)
        return
    print("waiting", flush=True)
    (paths.cache() / "started").touch()
    try:
        while not (paths.cache() / "go").exists():
            time.sleep(0.05)
    except entry.Stopped as stopped:
        checkpoint.write_text(signal.Signals(stopped.number).name)
        raise


def evaluate():
    tuned = json.loads((TRAIN / "run.json").read_text())["loss"]
    METRICS.parent.mkdir(parents=True, exist_ok=True)
    both = {"base": BASE, "tuned": tuned}
    metrics = {name: {"loss": x, "perplexity": math.exp(x)} for name, x in both.items()}
    change = tuned - BASE
    interval = {"loss_change_low": change - 0.1, "loss_change_high": change + 0.1}
    METRICS.write_text(json.dumps({**metrics, "loss_change": change, **interval}))


if __name__ == "__main__":
    name = sys.argv[1]
    raise SystemExit(entry.guarded(name, {"train": train, "evaluate": evaluate}[name]))
