"""What DVC and a sweep cost beside training: `python -m benchmarks.sweeps [--out DIR]`.

In a clone of the last commit, with `experiment=smoke` (the tiny model, a few rows):

    no-op          `dvc repro` where nothing has changed
    one point      each of a `sweep`, beside the same stages run by hand
    sixteen points joblib, two at a time: all have to end well
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import machine
from stages.core import console, entry, files
from stages.core.errors import RunFailed

STAGES = ("train", "evaluate", "report")
"""What a point with another learning rate runs, beside compose."""
POINTS, AT_ONCE = 16, 2
SMOKE = ("experiment: null", "experiment: smoke")


def main(argv: Sequence[str]) -> int:
    """Take the figures and write `<out>/sweeps.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweeps", description=__doc__)
    parser.add_argument("--out", type=Path, default=machine.REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--repeats", type=int, default=5, help="no-ops and points, 2 or more")
    given = parser.parse_args(argv)
    return entry.guarded("benchmarks", lambda: _take(given))


def _take(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        project = Project(Path(name) / "project")
        report: dict[str, Any] = {"machine": machine.facts()}
        report["noop_repro_s"] = [project.run("dvc", "repro") for _ in range(given.repeats)]
        report["one_point"] = project.points([f"{2 + turn}e-3" for turn in range(given.repeats)])
        report["sixteen_points"] = project.many()
    report["load_at_the_end"] = round(os.getloadavg()[0], 2)
    noop = statistics.median(report["noop_repro_s"])
    over = statistics.median(turn["overhead_s"] for turn in report["one_point"])
    report["medians"] = {"noop_repro_s": noop, "point_overhead_s": over}
    files.write_json(given.out / "sweeps.json", report)
    many = report["sixteen_points"]
    console.say(f"no-op dvc repro {noop:.2f} s; a point's overhead {over:.2f} s;"
                f" {many['done']} of {POINTS} points in {many['seconds']:.0f} s")  # fmt: skip


class Project:
    """A clone of this repository, its pipeline run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "-q", machine.REPOSITORY, folder], check=True)
        config = folder / "conf" / "config.yaml"
        text = config.read_text(encoding="utf-8")
        if SMOKE[0] not in text:
            raise RunFailed("conf/config.yaml lacks a line", expected=SMOKE[0])
        config.write_text(text.replace(*SMOKE), encoding="utf-8")
        self.run("python", "-m", "stages.compose", "--drop")
        self.run("dvc", "repro")
        self.run("git", "commit", "-qam", "smoke")

    def run(self, *words: str) -> float:
        """A command in the clone; its seconds.

        Raises:
            RunFailed: It failed.
        """
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DVC_")}
        person = {f"GIT_{role}_{key}": "someone" for role in ("AUTHOR", "COMMITTER")
                  for key in ("NAME", "EMAIL")}  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**kept, **person, "PATH": programs, "DVC_NO_ANALYTICS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunFailed(
                "A command of the benchmark failed",
                where=" ".join(words),
                found=done.stdout[-2000:],
            )
        return time.perf_counter() - started

    def points(self, rates: Sequence[str]) -> list[dict[str, float]]:
        """Each point of a sweep, and its stages by hand."""
        self.run("python", "-m", "stages", "sweep", "--name", "one", "-m",
                 f"train.learning_rate={','.join(rates)}")  # fmt: skip
        table = self.table("one").set_index("train.learning_rate")
        found = []
        for rate in rates:
            seconds = float(table["seconds"][float(rate)])
            self.run("python", "-m", "stages.compose", f"train.learning_rate={rate}")
            by_hand = {name: self.run("python", "-m", f"stages.{name}") for name in STAGES}
            overhead = seconds - sum(by_hand.values())
            load = round(os.getloadavg()[0], 2)
            found.append({"seconds": seconds, **by_hand, "overhead_s": overhead, "load": load})
        self.run("git", "checkout", "-q", ".")
        self.run("dvc", "checkout", "--force")
        return found

    def many(self) -> dict[str, float]:
        """Sixteen points side by side."""
        seconds = self.run(
            "python", "-m", "stages", "sweep", "--name", "many", "-m",
            f"train.seed=range(0,{POINTS})", "train.updates=4", "hydra/launcher=joblib",
            f"hydra.launcher.n_jobs={AT_ONCE}",
        )  # fmt: skip
        table = self.table("many")
        return {
            "seconds": seconds,
            "points": len(table),
            "done": int((table["state"] == "done").sum()),
        }

    def table(self, name: str) -> pd.DataFrame:
        """The points of a sweep."""
        return pd.read_parquet(self.folder / "reports" / "sweeps" / name / "points.parquet")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
