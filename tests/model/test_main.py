"""`python -m stages.model`: writes the manifest or says why not; `--path` prints the folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.core import files

ROOT = Path(__file__).parents[2]


def write_params(root, **model):
    settings = {"model": model, "train": {"updates": 5}}
    (root / "params.yaml").write_text(json.dumps(settings))


def stage(root, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.pop("DVC_ROOT", None)
    return subprocess.run(
        [sys.executable, "-m", "stages.model", *words],
        cwd=root,
        env=environment | {"HF_HOME": str(root / "hub")},
        check=False,
        capture_output=True,
        text=True,
    )


def test_writes_the_manifest_and_prints_a_folder_that_holds_the_model(tmp_path):
    write_params(tmp_path, repo="builtin:tiny", dtype="float32")
    done = stage(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiny: llama, 4 layers of 64" in done.stderr
    manifest = json.loads((tmp_path / "data" / "model.json").read_text())
    first = (tmp_path / "data" / "model.json").read_bytes()
    shown = stage(tmp_path, "--path")
    folder = Path(shown.stdout.strip())
    assert shown.stdout.count("\n") == 1
    assert folder.is_absolute()
    assert (
        files.sha256_file(folder / "model.safetensors")
        == manifest["files"]["model.safetensors"]["sha256"]
    )
    assert stage(tmp_path).returncode == 0
    assert (tmp_path / "data" / "model.json").read_bytes() == first


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"path": "models/none"}, "models/none: no such file or folder"),
        (
            {"repo": "org/name", "revision": "0123456789abcdef0123456789abcdef01234567"},
            "model.path=models/mine",
        ),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(tmp_path, model, said):
    write_params(tmp_path, **model)
    done = stage(tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_path_before_the_manifest_says_what_to_run(tmp_path):
    write_params(tmp_path, repo="builtin:tiny")
    done = stage(tmp_path, "--path")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "dvc repro" in done.stderr
