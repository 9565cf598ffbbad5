"""Eight points of learning rate × rank beside eight runs of mlx-lm: `python -m benchmarks.points`.

Ours: the train stage as a process of its own for each point, its start, the model's load and the
check of the plan included; the first one makes the activation cache that all share. mlx-lm: its own
`train()` over the same examples and as many passes; the same job for every point, so a few runs are
taken and their mean counts eight times, without the load of the model. Then one point again without
the cache: how far apart the adapters are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import choice, figures, machine, turns, workspace
from benchmarks.spec import THEIRS, Spec
from stages.core import console, entry, files
from stages.core.tables import read_examples

RATES, RANKS = (5e-5, 1e-4, 2e-4, 4e-4), (4, 8)
PASSES, EFFECTIVE, ROWS = 3, 8, 4
TRAIN = "data/examples/train.parquet"


def main(argv: Sequence[str]) -> int:
    """Take the figure and write `<out>/points.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.points", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model: does it run?")
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--theirs", type=int, default=2, help="runs of mlx-lm that are timed")
    parser.add_argument("--out", type=Path, default=machine.REPOSITORY / "benchmarks" / "results")
    given = parser.parse_args(argv)
    return entry.guarded("benchmarks", lambda: _take(given))


def _take(given: argparse.Namespace) -> None:
    job = Job("tiny", 96, 2) if given.quick else Job("smollm2", figures.CAP, 8)
    folder = job.prepared(given.examples)
    facts = machine.facts()
    spec = Spec(THEIRS, TRAIN, job.cap, job.layers, ROWS, EFFECTIVE, PASSES)
    measure = turns.measured_in(folder)
    theirs = []
    for _ in range(given.theirs):
        found = measure(spec)
        theirs.append(found["first_s"] + sum(found["later_s"]))
        console.say(f"mlx-lm: {theirs[-1]:.1f} s")
    forget(folder)
    ours = []
    for rate, rank in itertools.product(RATES, RANKS):
        seconds = job.point(folder, rate, rank)
        ours.append({"learning_rate": rate, "rank": rank, "seconds": seconds})
        console.say(f"ours, rate {rate:g}, rank {rank}: {seconds:.1f} s")
    stored = adapters(folder)
    plain_s = job.point(folder, RATES[-1], RANKS[-1], "memory.activation_cache=off")
    report = {
        "machine": facts,
        "examples": given.examples,
        "passes": PASSES,
        "mlx_lm_s": theirs,
        "points": ours,
        "ours_s": sum(x["seconds"] for x in ours),
        "eight_of_mlx_lm_s": len(ours) * statistics.mean(theirs),
        "one_without_cache_s": plain_s,
        "change_apart": apart(stored, adapters(folder)),
    }
    report["times_faster"] = report["eight_of_mlx_lm_s"] / report["ours_s"]
    files.write_json(given.out / "points.json", report)
    console.say(
        f"{len(ours)} points {report['ours_s']:.0f} s, as many runs of mlx-lm"
        f" {report['eight_of_mlx_lm_s']:.0f} s: {report['times_faster']:.1f} times as fast;"
        f" with and without the cache {report['change_apart']:.1e} apart"
    )


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        name: Of workspace.JOBS.
        cap: No example is longer.
        layers: `train.num_layers`.
    """

    name: str
    cap: int
    layers: int

    def prepared(self, count: int) -> Path:
        """A workspace with `count` real examples to train; the first of them to validate on."""
        made = workspace.make(self.name)
        folder = workspace.WORK / f"{self.name}-points"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "data/examples").mkdir(parents=True)
        for part in ("pyproject.toml", "data/model.json"):
            shutil.copy(made / part, folder / part)
        rows = choice.spread(choice.usable(read_examples(made / TRAIN), self.cap), count)
        for split, some in (("train", rows), ("valid", rows[:1]), ("test", rows[:1])):
            choice.write(folder / f"data/examples/{split}.parquet", some)
        files.write_json(folder / "reports/validate.json", {"ok": True})
        self.write(folder, RATES[0], RANKS[0])
        return folder

    def write(self, folder: Path, rate: float, rank: int) -> None:
        """The parameters of one point."""
        train = {
            "learning_rate": rate,
            "lora_parameters": {"rank": rank},
            "num_layers": self.layers,
            "effective_batch_size": EFFECTIVE,
            "epochs": PASSES,
            "updates": None,
        }
        job = workspace.JOBS[self.name]
        values = {**job, "split": {"max_seq_length": self.cap}, "train": train}
        files.write_text(folder / "params.yaml", json.dumps(values))

    def point(self, folder: Path, rate: float, rank: int, *words: str) -> float:
        """Seconds of the train stage for one point, from its start to its end."""
        self.write(folder, rate, rank)
        started = time.perf_counter()
        workspace.run(folder, "-m", "stages.train", *words, root=folder)
        return time.perf_counter() - started


def forget(folder: Path) -> None:
    """Remove what earlier points left: the first one starts without activations or measurements."""
    for name in (".cache", "adapters"):
        shutil.rmtree(folder / name, ignore_errors=True)


def adapters(folder: Path) -> dict[str, np.ndarray]:
    """The trained arrays that were 0 at the start (`lora_b`), so that they are their change."""
    from safetensors.numpy import load_file

    found = load_file(folder / "adapters" / "adapters.safetensors")
    return {name: x for name, x in found.items() if name.endswith("lora_b")}


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """‖a - b‖ / ‖b‖ over all arrays together, in float64."""
    both = [(a[name].astype(np.float64), b[name].astype(np.float64)) for name in b]
    difference = sum(float(((x - y) ** 2).sum()) for x, y in both)
    return float(np.sqrt(difference / sum(float((y**2).sum()) for _, y in both)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
