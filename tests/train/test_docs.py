"""Every command of docs/many-machines.md that one machine can run, in a real project."""

import mlx.core as mx
import pytest

from tests import project as projects
from tests.sharing.blocks import commands

pytestmark = pytest.mark.slow


def test_many_machines(tmp_path):
    project = projects.make(tmp_path / "project", tmp_path / "home")
    project.edit("conf/config.yaml", "experiment: null", "experiment: smoke")
    project.repro("validate")
    for line in commands("many-machines.md"):
        if "10.0.0.1" in line:  # tests/train/ranks/test_ranks.py runs mlx.launch
            continue
        if "nccl" in line and not mx.distributed.is_available("nccl"):
            done = project.run("bash", "-c", line, check=False)
            assert (done.status, "does not have the backend" in done.output) == (2, True)
            continue
        project.run("bash", "-c", line)
        assert project.json("reports/train/run.json")["ranks"] == 2
