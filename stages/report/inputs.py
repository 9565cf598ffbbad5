"""Everything the page shows, read from what earlier stages left; what is missing is named.

The page is also made when a run was interrupted: each part that is not there yet stays None and
stands in `missing`. While training has not finished, its newest checkpoint's history is shown.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from stages.core import files, paths
from stages.core.config.settings import Settings
from stages.report import reading

REPORTS = Path("reports")
STAGES = {
    "data/model.json": "model",
    "reports/collect.json": "collect",
    "reports/tokenize.json": "tokenize",
    "reports/split.json": "split",
    "reports/lengths.png": "split",
    "reports/validate.json": "validate",
    "reports/train/run.json": "train",
    "adapters/adapter_config.json": "train",
    "reports/evaluate/metrics.json": "evaluate",
    "reports/evaluate/samples.json": "evaluate",
    "reports/evaluate/rows.parquet": "evaluate",
}
"""File and the stage that makes it."""
MADE = ("dvc.lock", "reports/evaluate/metrics.json")
"""Files in git that the pipeline writes while it runs."""


@dataclass(frozen=True)
class Training:
    """What is known of the training run.

    Attributes:
        run: run.json, or the plan of a checkpoint; {} where there is neither.
        history, valid, telemetry: history.csv, valid.csv, run.csv; empty where missing.
        checkpoint: Update of the checkpoint that this was read from; None for a finished stage.
        stopped: stopped.json of a run that ended at a number that is not finite, or None.
    """

    run: dict[str, Any]
    history: pd.DataFrame
    valid: pd.DataFrame
    telemetry: pd.DataFrame
    checkpoint: int | None = None
    stopped: dict[str, Any] | None = None


@dataclass(frozen=True)
class Inputs:
    """One run, as far as it got. Each part is None where its file is missing."""

    settings: Settings
    manifest: dict[str, Any] | None = None
    adapter_sha256: str | None = None
    collect: dict[str, Any] | None = None
    tokenize: dict[str, Any] | None = None
    split: dict[str, Any] | None = None
    lengths_png: bytes | None = None
    validate: dict[str, Any] | None = None
    training: Training | None = None
    metrics: dict[str, Any] | None = None
    samples: dict[str, Any] | None = None
    rows: pd.DataFrame | None = None
    prove: dict[str, Any] | None = None
    commit: str = ""
    changed: list[str] = field(default_factory=list)
    """Tracked files that differ from the commit, but for those that the run itself writes."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Stage → its files that are not there."""


def read(settings: Settings) -> Inputs:
    """Read the current directory's run.

    Raises:
        UserError: A file is there but cannot be read, or is not what its stage writes.
    """
    missing: dict[str, list[str]] = {}
    for name, stage in STAGES.items():
        if not Path(name).exists():
            missing.setdefault(stage, []).append(name)
    weights = Path("adapters/adapters.safetensors")
    commit, changed = _commit()
    return Inputs(
        settings=settings,
        manifest=reading.json(Path("data/model.json")),
        adapter_sha256=files.sha256_file(weights) if weights.exists() else None,
        collect=reading.json(REPORTS / "collect.json"),
        tokenize=reading.json(REPORTS / "tokenize.json"),
        split=reading.json(REPORTS / "split.json"),
        lengths_png=reading.image(REPORTS / "lengths.png"),
        validate=reading.json(REPORTS / "validate.json"),
        training=_training(),
        metrics=reading.json(REPORTS / "evaluate/metrics.json"),
        samples=reading.json(REPORTS / "evaluate/samples.json"),
        rows=reading.parquet(REPORTS / "evaluate/rows.parquet"),
        prove=reading.json(REPORTS / "prove.json"),
        commit=commit,
        changed=changed,
        missing=missing,
    )


def _training() -> Training | None:
    folder = REPORTS / "train"
    stopped, run = reading.json(folder / "stopped.json"), reading.json(folder / "run.json")
    if run is not None:
        return Training(run, *_tables(folder), stopped=stopped)
    newest = _newest_checkpoint()
    if newest is None:
        return None if stopped is None else Training({}, *_tables(folder), stopped=stopped)
    state = reading.json(newest / "state.json") or {}
    run = {"plan": state.get("plan", {})}
    return Training(run, *_tables(newest), checkpoint=int(newest.name), stopped=stopped)


def _tables(folder: Path) -> list[pd.DataFrame]:
    return [reading.csv(folder / name) for name in ("history.csv", "valid.csv", "run.csv")]


def _newest_checkpoint() -> Path | None:
    """The checkpoint folder written last on this machine, whatever run it is of."""
    found = [path.parent for path in paths.cache("checkpoints").glob("*/*/state.json")]
    found = [folder for folder in found if folder.name.isdigit()]
    return max(found, key=lambda folder: (folder / "state.json").stat().st_mtime, default=None)


def _commit() -> tuple[str, list[str]]:
    """The commit this folder is at, and tracked files that differ from it; "" where unknown.

    What the run itself writes is no change to it.
    """
    try:
        commit = _git("rev-parse", "--short=12", "HEAD").strip()
        others = [f":(exclude){name}" for name in MADE]
        status = _git(
            "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", *others
        )
    except (OSError, subprocess.CalledProcessError):
        return "", []
    return commit, [entry[3:] for entry in status.split("\0") if entry]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout
