"""What works on every architecture of mlx-lm, tried on a small random model of each.

python -m tests.core.model_census            # all of them, two at a time; writes docs/models.md
python -m tests.core.model_census NAME ...   # prints what is found, writes nothing

Some configurations crash the process or eat memory, so processes with a memory limit of their own
do the work: one that dies costs one architecture, and the rest goes to a new one.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/models.md"
MEMORY = 8 << 30
"""Address space of a working process, in bytes."""
SECONDS = 120
"""Silence after which a working process is ended."""
PROCESSES = 2
SETTINGS = ("loss at targets", "activation cache", "recomputation", "attention in blocks")
WORKER, RESULT, BEGUN = "--worker", "result ", "begun "


def census(names: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """By architecture: `model` and each of SETTINGS -> "" where it works, else why not."""
    names = list(names) or _names()
    shares = [names[i::PROCESSES] for i in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = list(pool.map(_in_processes, shares))
    found = {name: verdict for part in parts for name, verdict in part.items()}
    return {name: found[name] for name in names}


def works(verdict: dict[str, str]) -> bool:
    """Whether loss at targets and activation cache, which most depends on, both work."""
    return not (verdict["model"] or verdict[SETTINGS[0]] or verdict[SETTINGS[1]])


def _names() -> list[str]:
    """In a process of its own: this one imports no MLX."""
    code = "from tests.core import model_configs; print(*model_configs.names(), sep='\\n')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _in_processes(names: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    while left := [name for name in names if name not in found]:
        found |= _one_process(left)
    return found


def _one_process(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Verdicts from one process, until it ends; the one that ended it gets its own verdict."""
    command = [sys.executable, "-m", "tests.core.model_census", WORKER, *names]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    found, begun = {}, names[0]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if line.startswith(BEGUN):
                begun = line.removeprefix(BEGUN).strip()
            elif line.startswith(RESULT):
                found[begun] = json.loads(line.removeprefix(RESULT))
    if begun not in found:
        found[begun] = {"model": "the process that tries it crashes"}
    return found


def work(names: Sequence[str]) -> None:
    """Examine architectures in this process, printing a line before and after each."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from stages.core.machine import device

    device.load_blas()
    import signal

    from tests.core import model_trials

    for name in names:
        print(BEGUN + name, flush=True)
        signal.alarm(SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found = model_trials.examine(name)
            os.chdir(ROOT)
        print(RESULT + json.dumps({key: _plain(text) for key, text in found.items()}), flush=True)


def _plain(text: Any) -> str:
    """One short line without numbers that differ between machines."""
    line = (str(text).strip().splitlines() or [""])[0]
    if re.search(r"off by \S*\d", line):
        return "loss or gradient differ from the whole model's"
    return line[:160]


def document(found: dict[str, dict[str, str]]) -> str:
    """docs/models.md."""
    tried = {name: verdict for name, verdict in found.items() if not verdict["model"]}
    good = [name for name, verdict in tried.items() if works(verdict)]
    whole = [name for name, v in tried.items() if not any(v[s] for s in SETTINGS)]
    about = (
        f"A small random model of each of the {len(found)} architectures of mlx-lm {_version()}, in"
        " float32 on the CPU, with LoRA on every linear layer of its upper layers."
        f" **{len(good)} of {len(tried)}** that can be trained here take loss at targets and the"
        " activation cache with the loss and the whole gradient of the whole model (to 1e-5), cut"
        " below layer 1, the middle one and the last one. A setting that fails its check is"
        " switched off for the run, with one line, and the run goes on. This page is printed by"
        " `python -m tests.core.model_census` and compared by `tests/core/test_all_models.py`."
    )
    lines = [
        "# Which architectures of mlx-lm can use which memory setting",
        "",
        textwrap.fill(about, 99),
        "",
        "## All of it works",
        "",
        textwrap.fill(", ".join(whole) + ".", 99, break_on_hyphens=False),
        "",
        "## Something is switched off",
        "",
        "| architecture | setting | why |",
        "|---|---|---|",
    ]
    for name, verdict in tried.items():
        lines += [f"| {name} | {s} | {_cell(verdict[s])} |" for s in SETTINGS if verdict[s]]
    notes = {name: v["note"] for name, v in tried.items() if v.get("note")}
    if notes:
        lines += ["", "## Notes", ""] + [f"- {name}: {text}" for name, text in notes.items()]
    lines += ["", "## Not tried", "", "| architecture | why |", "|---|---|"]
    lines += [f"| {n} | {_cell(v['model'])} |" for n, v in found.items() if v["model"]]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _version() -> str:
    from importlib.metadata import version

    return version("mlx-lm")


def main(words: Sequence[str]) -> None:
    """See the module's docstring."""
    if words[:1] == [WORKER]:
        work(words[1:])
        return
    found = census(words)
    if words:
        print(json.dumps(found, indent=2))
        return
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(found), encoding="utf-8")
    print(document(found))


if __name__ == "__main__":
    main(sys.argv[1:])
