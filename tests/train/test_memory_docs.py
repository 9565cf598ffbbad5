"""Every command of docs/memory.md, as written there, in a real project."""

import json

import pytest

from tests import project as projects
from tests.sharing.blocks import commands

pytestmark = pytest.mark.slow


def test_memory(tmp_path):
    project = projects.make(tmp_path / "project", tmp_path / "home")
    project.edit("conf/config.yaml", "experiment: null", "experiment: smoke")
    project.repro("validate", timeout=900)
    lines = commands("memory.md")
    assert len(lines) == 6
    for line in lines:
        done = project.run("bash", "-c", line, timeout=900)
        if "stages plan" in line:
            assert ("predicted peak" in done.output) != ("--json" in line)
        else:
            assert project.json("reports/train/run.json")["recoveries"] == []
        if line.endswith("memory.grad_checkpoint=2"):
            plan = project.json("reports/train/run.json")["plan"]
            assert (plan["batch_size"], plan["recompute"]) == (2, 2)
        if "--json" in line:
            start = done.output.index("{\n")
            assert json.JSONDecoder().raw_decode(done.output[start:])[0]
