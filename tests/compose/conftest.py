"""A project's settings alone: conf/ in a folder of its own, with git's HEAD holding it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a project that holds conf/ and nothing else, committed."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name in ("DVC_ROOT", "DVC_EXP_NAME", "DVC_STAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(folder):
    """Commit all of a folder, which becomes a repository where it is none."""
    person = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*person, "commit", "-qm", "settings"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
