"""Sweeps and teams over the real pipeline: the smoke experiment, run once."""

import re
import time

import pandas as pd
import pytest

from tests import project as projects
from tests.sharing.test_share import join, share, team
from tests.sweep.small import experiments, states, sweep
from tests.sweep.small import ran as ran_since

pytestmark = pytest.mark.slow
OUTPUTS = (
    "adapters/adapters.safetensors",
    "adapters/adapter_config.json",
    "reports/evaluate/metrics.json",
    "reports/report.html",
    "reports/card.md",
    "reports/train/history.csv",
    "data/examples/train.parquet",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    project = projects.make(tmp_path_factory.mktemp("real") / "project", home)
    project.edit("conf/config.yaml", "experiment: null", "experiment: smoke")
    project.repro()
    project.commit()
    return project


@pytest.fixture(scope="module")
def swept(ran, tmp_path_factory):
    """Two points beside the one that ran; what comes before training is the same for all."""
    project = ran.copy(tmp_path_factory.mktemp("swept") / "project")
    sweep(project, "-m", "train.learning_rate=2e-3,3e-3")
    return project


def test_a4_a_colleague_joins_and_has_the_same_files(ran, tmp_path):
    made = team(tmp_path, ran)
    share(made.one, "--store", "../store")
    two = made.clone("two")
    (two.folder / "local.yaml").write_text("memory: {batch_size: 1}\n")
    assert "runs nothing" in join(two).output
    assert two.repro("--pull").stages == []
    for file in OUTPUTS:
        assert (two.folder / file).read_bytes() == (made.one.folder / file).read_bytes(), file
    assert two.run("git", "status", "--porcelain").output == ""


def test_points_share_what_comes_before_training(swept):
    assert experiments(swept) == {"learning_rate-2e-3", "learning_rate-3e-3"}
    for one in states(swept).values():
        with open(one["log"]) as file:
            log = file.read()
        run = set(re.findall(r"^> python -m stages\.(\w+)$", log, re.MULTILINE))
        assert run == {"compose", "train", "evaluate", "report"}
        assert "on the disk from before" in log  # activations below the trained layers


def test_the_table_holds_the_metrics_of_each_point(swept):
    table = pd.read_parquet(swept.folder / "reports/sweeps/learning_rate/points.parquet")
    assert table["train.learning_rate"].tolist() == [0.002, 0.003]
    assert table["base_loss"].nunique() == 1
    assert table["tuned_loss"].nunique() == 2
    assert (table["peak_gb"] > 0).all()
    assert (table["train_seconds"] > 0).all()
    shown = swept.run("dvc", "exp", "show", "--csv").output
    assert all(name in shown for name in table["experiment"])


def test_an_applied_point_is_kept_in_conf_and_runs_nothing(swept, tmp_path):
    project = swept.copy(tmp_path / "project")
    sweep(project, "--apply", "learning_rate-3e-3", "--keep", "warmer")
    assert "learning_rate: 0.003" in project.text("conf/experiment/warmer.yaml")
    assert project.repro().stages == ["compose"]
    assert project.repro().stages == []
    project.commit()
    began = time.time()
    sweep(project, "-m", "train.learning_rate=3e-3,2e-3")
    assert ran_since(project, began) == set()


def test_code_that_changed_no_result_is_committed_without_a_run(ran, tmp_path):
    project = ran.copy(tmp_path / "project")
    file = project.folder / "stages/train/loop.py"
    file.write_text(file.read_text() + "# a comment\n")
    assert "stages/train" in project.run("dvc", "status").output
    project.run("dvc", "commit", "--force")
    assert "up to date" in project.run("dvc", "status").output
    assert project.repro().stages == []
