"""What the light process refuses and says."""

import subprocess
import sys

import pytest
from train_workspace import environment

from stages.core import files
from stages.core.errors import UserError
from stages.train.recovery import supervisor


def test_it_imports_no_mlx():
    modules = "stages.train.recovery.supervisor, stages.train.__main__"
    code = f"import sys, {modules}; print('mlx' in sys.modules)"
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
