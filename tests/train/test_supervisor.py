"""What the light process refuses and says."""

import signal
import subprocess
import sys

import pytest
from train_workspace import environment

from stages.core import files
from stages.core.errors import UserError
from stages.train import supervisor


def test_it_imports_no_mlx():
    code = "import sys, stages.train.supervisor, stages.train.__main__; print('mlx' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_what_validate_refused_is_not_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="missing"):
        supervisor.require_validated()
    checks = [
        {"level": "warning", "message": "few rows"},
        {"level": "error", "message": "3 examples for a batch of 4"},
    ]
    files.write_json(tmp_path / "reports/validate.json", {"ok": False, "checks": checks})
    with pytest.raises(UserError) as caught:
        supervisor.require_validated()
    assert "3 examples for a batch of 4" in str(caught.value)
    assert "few rows" not in str(caught.value)
    files.write_json(tmp_path / "reports/validate.json", {"ok": True, "checks": checks[:1]})
    supervisor.require_validated()


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        (None, 0, 0),
        (None, 2, 2),
        (None, 143, 143),
        (signal.SIGINT, 130, 130),
        (signal.SIGINT, 1, 130),
        (signal.SIGTERM, -signal.SIGTERM, 143),
        (signal.SIGTERM, 0, 0),
    ],
)
def test_the_childs_status_is_the_stages(asked, status, expected):
    watched = supervisor.Supervisor.__new__(supervisor.Supervisor)
    watched.asked = asked
    watched._child = subprocess.Popen([sys.executable, "-c", f"import os; {ending(status)}"])
    assert watched.wait() == expected


def ending(status):
    return f"os._exit({status})" if status >= 0 else f"os.kill(os.getpid(), {-status})"


@pytest.mark.parametrize(
    ("number", "memory"), [(signal.SIGKILL, True), (signal.SIGSEGV, True), (signal.SIGABRT, False)]
)
def test_a_death_is_named_and_is_status_1(number, memory):
    error = supervisor.died(-number)
    assert error.status == 1
    assert error.found == number.name
    assert ("memory" in error.fix) == memory
