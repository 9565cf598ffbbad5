"""A real copy of this project in a git and DVC repository of its own, for tests of the pipeline."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PERSON = {"NAME": "someone", "EMAIL": "someone@example.org"}


def environment(home: Path) -> dict[str, str]:
    """This interpreter's programs first on PATH, and no settings of the machine's user."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "GIT_"))}
    for role in ("AUTHOR", "COMMITTER"):
        kept |= {f"GIT_{role}_{key}": value for key, value in PERSON.items()}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "DVC_NO_ANALYTICS": "1",
        "DVC_GLOBAL_CONFIG_DIR": str(home / "dvc-global"),
        "DVC_SYSTEM_CONFIG_DIR": str(home / "dvc-system"),
        "DVC_SITE_CACHE_DIR": str(home / "dvc-site"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@dataclass(frozen=True)
class Ran:
    """What a command did.

    Attributes:
        status: Exit status.
        output: stdout and stderr together.
        stages: The stages that DVC ran, in order, without those restored from its cache.
        cpu_s: Processor seconds of the command and its children.
    """

    status: int
    output: str
    stages: list[str]
    cpu_s: float


@dataclass(frozen=True)
class Project:
    """A copy of the project: run commands in it, edit its files, look at its outputs."""

    folder: Path
    home: Path

    def run(self, *words: str, check: bool = True, timeout: float = 300) -> Ran:
        """Run a command in the project's folder."""
        before = _children_s()
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=environment(self.home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, done.stdout[-4000:]
        stages = re.findall(r"^> python -m stages\.(\w+)$", done.stdout, re.MULTILINE)
        return Ran(done.returncode, done.stdout, stages, _children_s() - before)

    def repro(self, *words: str, **options) -> Ran:
        """`dvc repro`."""
        return self.run("dvc", "repro", *words, **options)

    def experiment(self, *overrides: str, name: str = "point", **options) -> Ran:
        """`dvc exp run -S …` in this workspace."""
        words = [word for override in overrides for word in ("-S", override)]
        return self.run("dvc", "exp", "run", "-n", name, *words, **options)

    def commit(self) -> None:
        """Commit all that git sees."""
        self.run("git", "add", "-A")
        self.run("git", "commit", "-q", "--allow-empty", "-m", "change")

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace the first `old` in a file, which must hold it."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{file} lacks {old!r}"
        path.write_text(text.replace(old, new, 1))

    def json(self, file: str):
        """A JSON file of the project."""
        return json.loads((self.folder / file).read_text())

    def text(self, file: str) -> str:
        """A text file of the project."""
        return (self.folder / file).read_text()

    def copy(self, folder: Path) -> Project:
        """The same project, with its outputs and caches, in another folder."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project(folder, self.home)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make(folder: Path, home: Path, *, commit: bool = True) -> Project:
    """Copy what git tracks here (as it stands in the working tree) and commit it there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file() and name not in ("dvc.lock", "params.yaml"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    project = Project(folder, home)
    if commit:
        project.run("git", "init", "-q")
        project.commit()
    return project
