"""A5 and A2: a stage killed while it puts its results in place, then `dvc repro`.

The kill is exact: a module that every interpreter of the project loads at its start ends the stage
with SIGKILL just before, or just after, the first file or folder outside .cache gets its name.
"""

import json
import re
import shutil

import pytest
import yaml
from safetensors.numpy import load_file

from tests import project as projects

KILLER = """
import os, signal, sys

stage, when = os.environ.get("KILL", " ").split(" ")
if stage and f"stages.{stage}" in sys.orig_argv:
    here = os.path.realpath(os.getcwd())

    def killing(function):
        def renames(source, target, *rest, **more):
            place = os.path.relpath(os.path.realpath(target), here)
            counts = not place.startswith((".cache", "..", "/", ".dvc"))
            if counts and ".tmp-" not in place and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            function(source, target, *rest, **more)
            if counts and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
        return renames

    os.rename, os.replace = killing(os.rename), killing(os.replace)
"""
STAGES = ["collect", "model", "tokenize", "split", "validate", "train", "evaluate", "report"]
TELEMETRY = re.compile(r"reports/(train/run\.\w+|report\.html|card\.md|lengths\.png)")
"""Outputs that say when and where they were made, or that a library writes its own way."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke experiment, run once and committed."""
    home = tmp_path_factory.mktemp("home")
    made = projects.make(tmp_path_factory.mktemp("smoke") / "project", home)
    made.edit("conf/config.yaml", "experiment: null", "experiment: smoke")
    made.repro()
    made.commit()
    (home / "killer").mkdir()
    (home / "killer/sitecustomize.py").write_text(KILLER)
    return made


def outputs(project, stage):
    """Final name → bytes of every output of a stage that is there."""
    found = {}
    entry = yaml.safe_load(project.text("dvc.yaml"))["stages"][stage]
    for out in [*entry.get("outs", []), *entry.get("metrics", [])]:
        path = project.folder / (out if isinstance(out, str) else next(iter(out)))
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        found |= {file.relative_to(project.folder): file for file in files if file.is_file()}
    return {name.as_posix(): file.read_bytes() for name, file in found.items()}


def results(found):
    return {name: data for name, data in found.items() if not TELEMETRY.fullmatch(name)}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_a5_the_next_run_is_as_if_the_stage_had_never_been_killed(smoke, monkeypatch, stage, when):
    whole = outputs(smoke, stage)
    monkeypatch.setenv("PYTHONPATH", str(smoke.home / "killer"))
    monkeypatch.setenv("KILL", f"{stage} {when}")
    killed = smoke.run("dvc", "repro", "-f", "-s", "--no-run-cache", stage, check=False)
    assert killed.status == 255, killed.output[-2000:]
    left = outputs(smoke, stage)
    assert set(left) <= set(whole), "a half-written file has a final name"
    assert len(left) < len(whole) or when == "after"
    for name, data in results(left).items():
        assert data == whole[name], name
    if stage == "train" and "adapters/adapters.safetensors" in left:
        config = json.loads(left["adapters/adapter_config.json"])
        weights = load_file(smoke.folder / "adapters/adapters.safetensors")
        ranks = {array.shape[1] for name, array in weights.items() if name.endswith("lora_a")}
        assert ranks == {config["lora_parameters"]["rank"]}

    monkeypatch.delenv("KILL")
    again = smoke.run("dvc", "repro", "-f", "-s", "--no-run-cache", stage)
    assert again.stages == [stage]
    assert results(outputs(smoke, stage)) == results(whole)
    assert set(outputs(smoke, stage)) == set(whole)
    assert not [path for path in smoke.folder.rglob(".tmp-*") if ".cache" not in path.parts]
    smoke.repro()


def test_a2_a_run_that_fails_leaves_no_adapter_of_two_halves(smoke, tmp_path):
    """Another rank, and a disk that refuses the weights: no new config beside old weights."""
    project = smoke.copy(tmp_path / "project")
    project.edit("conf/train/lora.yaml", "rank: 8", "rank: 2")
    shutil.rmtree(project.folder / ".cache/checkpoints", ignore_errors=True)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\n"
        "whole = os.replace, os.rename\n"
        "def refuse(old):\n"
        "    def renames(source, target, *rest, **more):\n"
        "        if os.path.basename(target) == 'adapters' and 'stages.train' in sys.orig_argv:\n"
        "            raise OSError(28, 'No space left on device')\n"
        "        return old(source, target, *rest, **more)\n"
        "    return renames\n"
        "os.replace, os.rename = map(refuse, whole)\n"
    )
    failed = project.run("env", f"PYTHONPATH={broken}", "dvc", "repro", check=False)
    assert failed.status == 255
    assert "No space left" in failed.output
    assert not (project.folder / "adapters").exists()
    assert project.repro().stages[0] == "train"
    config = project.json("adapters/adapter_config.json")
    weights = load_file(project.folder / "adapters/adapters.safetensors")
    assert config["lora_parameters"]["rank"] == 2
    assert {a.shape[1] for name, a in weights.items() if name.endswith("lora_a")} == {2}
