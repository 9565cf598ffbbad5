"""A process ends with the one that started it, and a lock ends with its holder."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages.core.errors import UserError
from stages.core.machine.lock import locked

ROOT = str(Path(__file__).parents[3])
ENV = {**os.environ, "PYTHONPATH": ROOT}

WATCHED = """
import os, sys, time
from stages.core.machine import parent
parent.watch(lambda: os._exit(7), under_dvc=len(sys.argv) > 1)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def start(through_shell):
    """A middle process (python) that starts the watched one, directly or through sh."""
    word = "x" if through_shell else ""
    inner = f"{sys.executable} -c '{WATCHED}' {word}"
    command = ["sh", "-c", inner + "; true"] if through_shell else ["sh", "-c", "exec " + inner]
    middle = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", middle], env=ENV, stdout=subprocess.PIPE)
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("through_shell", [False, True])
def test_the_watched_process_ends_within_two_seconds_of_its_ancestor(through_shell):
    middle, watched = start(through_shell)
    assert psutil.pid_exists(watched)
    time.sleep(0.3)
    middle.kill()
    middle.wait()
    end = time.monotonic() + 2
    while psutil.pid_exists(watched) and time.monotonic() < end:
        if psutil.Process(watched).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)
    assert time.monotonic() < end


ORPHAN = """
import os, pathlib, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
from stages.core.machine import parent
def gone():
    pathlib.Path(sys.argv[2]).touch()
    os._exit(7)
parent.watch(gone, under_dvc=False, pid=int(sys.argv[1]))
time.sleep(60)
"""


def test_a_parent_that_ended_before_the_watcher_started_is_noticed(tmp_path):
    told = tmp_path / "told"
    middle = (
        "import os, subprocess, sys\n"
        f"words = [{sys.executable!r}, '-c', {ORPHAN!r}, str(os.getpid()), {str(told)!r}]\n"
        "subprocess.Popen(words)"
    )
    subprocess.run([sys.executable, "-c", middle], env=ENV, check=True)
    end = time.monotonic() + 50  # its imports take a while on a busy machine
    while not told.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert told.exists()


def test_a_second_holder_is_named_its_process(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom stages.core.machine.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), 'x'):\n    print(1, flush=True); time.sleep(60)"
    )
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], env=ENV, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    with pytest.raises(UserError) as caught, locked(lock, "this run"):
        pass
    assert str(holder.pid) in caught.value.found
    holder.kill()  # the lock goes with its holder, however it dies
    holder.wait()
    with locked(lock, "this run"):
        assert lock.read_text() == str(os.getpid())
