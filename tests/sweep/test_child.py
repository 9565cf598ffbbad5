"""dvc below a sweep's job: it waits for its words, and ends with the job at every moment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.commands.sweeping import ahead

ROOT = Path(__file__).parents[2]


def begun(folder, dvc, parent):
    """The child with a stand-in for dvc."""
    (folder / "dvc").mkdir()
    (folder / "dvc/__init__.py").touch()
    (folder / "dvc/cli.py").write_text(dvc)
    return subprocess.Popen(
        [sys.executable, "-m", "stages.commands.sweeping.child", str(parent)],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def asked(*words, **environment):
    """The line that a job writes."""
    return json.dumps({"words": words, "environment": environment}) + "\n"


def test_its_words_environment_and_status_are_dvcs(tmp_path):
    dvc = (
        "import os, sys\n"
        "def main(words):\n    print(words, dict(os.environ), sys.stdin.read())\n    return 7\n"
    )
    child = begun(tmp_path, dvc, os.getpid())
    said = child.communicate(asked("exp", "run", A="1"), timeout=60)[0]
    assert said == "['exp', 'run'] {'A': '1'} \n"
    assert child.returncode == 7


def test_without_words_it_ends_and_runs_nothing(tmp_path):
    child = begun(tmp_path, "def main(words):\n    print('ran')\n", os.getpid())
    assert child.communicate("", timeout=60)[0] == ""
    assert child.returncode == 0


@pytest.mark.parametrize("moment", ["import", "wait", "run"])
def test_a_parent_that_is_gone_interrupts_it(tmp_path, moment):
    wait = "import time; print('begun', flush=True); time.sleep(600)"
    dvc = wait if moment == "import" else f"def main(words):\n    {wait}\n"
    child = begun(tmp_path, dvc, os.getppid())  # not its parent, as if that one had just ended
    started = time.monotonic()
    if moment == "wait":
        child.wait(60)  # its input stays open
    child.communicate(asked("exp", "run") if moment == "run" else None, timeout=60)
    assert child.returncode == -signal.SIGINT
    assert time.monotonic() - started < 30


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder to start dvc in; nothing waits afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path
    ahead.end()


def version(child):
    """What a child that was asked for dvc's version says."""
    said = child.stdout.read()
    assert child.wait(60) == 0, said
    return said.split()[-1]


def test_one_dvc_waits_and_is_taken(root):
    from dvc import __version__

    ahead.prepare(root)
    ahead.prepare(root)
    waits = ahead._waiting
    child = ahead.start(root, ["--version"], os.environ)
    assert child is waits
    assert ahead._waiting is None
    assert version(child) == __version__


def test_a_waiting_dvc_that_was_killed_is_started_anew(root):
    from dvc import __version__

    ahead.prepare(root)
    ahead._waiting.kill()
    ahead._waiting.wait()
    assert version(ahead.start(root, ["--version"], os.environ)) == __version__


def test_a_waiting_dvc_ends_when_asked(root):
    ahead.prepare(root)
    waits = ahead._waiting
    ahead.end()
    assert waits.returncode == -signal.SIGKILL
    assert ahead._waiting is None
