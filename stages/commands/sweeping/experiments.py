"""DVC's experiments in git: is a point done already, and what did it give."""

from __future__ import annotations

import io
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from stages.commands.sharing import git, tracked
from stages.commands.sweeping.points import Point, Sweep
from stages.compose import composition
from stages.compose.applied import is_mathematics
from stages.core.errors import RunFailed

REF = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38}/([^/]+)")
METRICS = "reports/evaluate/metrics.json"
TRAIN = "reports/train"


@dataclass(frozen=True)
class Found:
    """An experiment in git.

    Attributes:
        name: As `dvc exp show` prints it.
        revision: Its commit.
    """

    name: str
    revision: str


def names(root: Path) -> dict[str, list[str]]:
    """Name → commits of every experiment of this repository, whatever it started from."""
    found: dict[str, list[str]] = {}
    listing = git.run("for-each-ref", "--format=%(objectname) %(refname)", "refs/exps/", cwd=root)
    for line in listing.splitlines():
        revision, ref = line.split(" ", maxsplit=1)
        match = REF.fullmatch(ref)
        if match:
            found.setdefault(match[1], []).append(revision)
    return found


def find(point: Point, sweep: Sweep) -> tuple[str, Found | None]:
    """The name to use for a point, and the finished experiment of that name if it is this point.

    A name that another experiment holds (other code, other settings beside the swept ones) is left
    to it: the point gets `NAME-2`, `NAME-3` …
    """
    taken = names(sweep.root)
    name, number = point.name, 1
    while name in taken:
        for revision in taken[name]:
            if is_same(point, sweep, revision):
                return name, Found(name, revision)
        number += 1
        name = f"{point.name}-{number}"
    return name, None


def is_same(point: Point, sweep: Sweep, revision: str) -> bool:
    """Whether a commit holds the finished run of a point: same mathematics, engine, code, rows."""
    metrics = _json_at(sweep.root, revision, METRICS)
    if metrics is None or engine(sweep.root, revision) != engine(sweep.root):
        return False
    params = _params_at(sweep.root, revision)
    if params is None or _mathematics(params) != point.mathematics:
        return False
    return git.hashes_at(sweep.root, revision, tracked.dependencies(sweep.root)) == sweep.code


def engine(root: Path, revision: str | None = None) -> dict[str, Any]:
    """Versions that are part of a run's identity, in the working tree or in a commit."""
    text = _text_at(root, revision, "pyproject.toml")
    table = tomllib.loads(text or "").get("tool", {}).get("samestep", {})
    return {name: table.get(name) for name in ("engine", "corpus")}


def metrics(root: Path, found: Found) -> dict[str, Any]:
    """metrics.json of an experiment.

    Raises:
        RunFailed: The experiment holds none.
    """
    read = _json_at(root, found.revision, METRICS)
    if read is None:
        raise RunFailed("An experiment has no metrics", where=found.name, expected=METRICS)
    return read


def telemetry(root: Path, found: Found) -> dict[str, float | None]:
    """Peak memory in GB and seconds of training, None where DVC's cache lacks reports/train."""
    from dvc.api import DVCFileSystem
    from dvc.exceptions import DvcException

    missing = {"peak_gb": None, "train_seconds": None}
    try:
        files = DVCFileSystem(str(root), rev=found.revision)
        run = json.loads(files.read_text(f"{TRAIN}/run.json"))
        steps = pd.read_csv(io.StringIO(files.read_text(f"{TRAIN}/run.csv")))
    except (OSError, ValueError, DvcException):
        return missing
    return {
        "peak_gb": run.get("plan", {}).get("measured_peak_gb"),
        "train_seconds": float(steps["seconds"].sum()),
    }


def _mathematics(params: DictConfig) -> dict[str, Any]:
    leaves = composition.leaves(params)
    return {key: value for key, value in leaves.items() if is_mathematics(key)}


def _params_at(root: Path, revision: str) -> DictConfig | None:
    text = _text_at(root, revision, "params.yaml")
    loaded = OmegaConf.create(text) if text else None
    return loaded if isinstance(loaded, DictConfig) else None


def _json_at(root: Path, revision: str, path: str) -> dict[str, Any] | None:
    text = _text_at(root, revision, path)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def _text_at(root: Path, revision: str | None, path: str) -> str | None:
    if revision is None:
        file = root / path
        return file.read_text(encoding="utf-8") if file.exists() else None
    return git.asked("show", f"{revision}:{path}", cwd=root)
