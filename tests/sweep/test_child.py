"""dvc below a sweep's job ends with it, also where the job ends while dvc is still imported."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def begun(folder, dvc, parent):
    """The child with a stand-in for dvc."""
    (folder / "dvc").mkdir()
    (folder / "dvc/__init__.py").touch()
    (folder / "dvc/cli.py").write_text(dvc)
    words = ["-m", "stages.commands.sweeping.child", str(parent), "exp", "run"]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def test_its_words_and_status_are_dvcs(tmp_path):
    dvc = "def main(words):\n    print(words)\n    return 7\n"
    child = begun(tmp_path, dvc, os.getpid())
    assert child.communicate(timeout=60)[0] == "['exp', 'run']\n"
    assert child.returncode == 7


@pytest.mark.parametrize("moment", ["import", "run"])
def test_a_parent_that_is_gone_interrupts_it(tmp_path, moment):
    wait = "import time; print('begun', flush=True); time.sleep(600)"
    dvc = wait if moment == "import" else f"def main(words):\n    {wait}\n"
    child = begun(tmp_path, dvc, os.getppid())  # not its parent, as if that one had just ended
    started = time.monotonic()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT
    assert time.monotonic() - started < 30
