"""A small project for sweeps: the real conf/, git, DVC and Hydra, training only pretended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import project as projects
from tests.project import Project, environment

DVC_YAML = """\
stages:
  train:
    cmd: python -m pretend train
    deps: [pretend.py, data/source]
    params: [train]
    outs: [reports/train]
  evaluate:
    cmd: python -m pretend evaluate
    deps: [pretend.py, reports/train]
    metrics:
      - reports/evaluate/metrics.json: {cache: false}
"""


def make(folder: Path, home: Path) -> Project:
    """The project with a pretended pipeline, committed."""
    project = projects.make(folder, home, commit=False)
    (folder / "dvc.yaml").write_text(DVC_YAML)
    (folder / "pretend.py").write_bytes(Path(__file__).with_name("pretend.py").read_bytes())
    project.edit(".gitignore", "/reports/train\n", "/reports/train\n/reports/sweeps\n")
    project.run("git", "init", "-q")
    project.commit()
    return project


def sweep(project: Project, *words: str, **options):
    """`python -m stages sweep …`, ended."""
    return project.run("python", "-m", "stages", "sweep", *words, **options)


def begun(project: Project, *words: str) -> subprocess.Popen:
    """A sweep in its own process group, once a point waits in its training."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stages", "sweep", *words],
        cwd=project.folder,
        env=environment(project.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not (project.folder / ".cache/started").exists():
        if process.poll() is not None or time.monotonic() > until:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(process.communicate()[0])
        time.sleep(0.05)
    return process


def experiments(project: Project) -> set[str]:
    """Names of all experiments in git."""
    refs = project.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").output
    return {ref.split("/")[-1] for ref in refs.split() if ref.count("/") == 4}


def states(project: Project) -> dict[str, dict]:
    """Label → state of every point of every sweep."""
    files = (project.folder / ".cache/sweeps").glob("*/*/points/*.json")
    found = [json.loads(file.read_text()) for file in files]
    return {one["label"]: one for one in found}


def ran(project: Project, since: float) -> set[str]:
    """Labels of the points that DVC ran (not found done) since a time, by the age of their logs."""
    logs = {label: Path(one["log"]) for label, one in states(project).items()}
    return {label for label, log in logs.items() if log.exists() and log.stat().st_mtime >= since}


def workspaces(project: Project) -> list[Path]:
    """Temporary workspaces that were not removed."""
    return list((project.folder / ".dvc/tmp/exps/standalone").glob("tmp*"))
