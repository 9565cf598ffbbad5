"""Sweeps with real git, DVC and Hydra over a pretended training: losses worked out by hand.

`pretend.loss`: 2 + (log10(rate) + 3)² − 0.1·log2(layers).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import psutil
import pytest

from tests.project import environment
from tests.sweep import small
from tests.sweep.small import begun, experiments, ran, states, sweep, workspaces

LINE = ("-m", "train.learning_rate=1e-2,1e-3", "train.num_layers=8", "train.seed=0,13")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The small project, nothing run yet."""
    home = tmp_path_factory.mktemp("home")
    return small.make(tmp_path_factory.mktemp("small") / "project", home)


@pytest.fixture
def project(plain, tmp_path):
    return plain.copy(tmp_path / "project")


@pytest.fixture(scope="module")
def swept(plain, tmp_path_factory):
    """A sweep of four points of which two fail, done once."""
    project = plain.copy(tmp_path_factory.mktemp("swept") / "project")
    return project, sweep(project, *LINE, check=False)


def test_a_failed_point_stops_no_other_and_is_told_at_the_end(swept):
    project, done = swept
    assert done.status == 1
    assert experiments(project) == {"learning_rate-1e-2-seed-0", "learning_rate-1e-3-seed-0"}
    last = done.output[done.output.rindex("error:") :]
    assert last.startswith("error: 2 of 4 points failed")
    assert last.count("This seed is unlucky at train.seed (found 13; to do take another)") == 2
    assert "Traceback" not in done.output
    assert workspaces(project) == []
    assert _below(project) == []  # nor a dvc that waits for one more point
    assert project.run("git", "status", "--porcelain").output == ""


def test_the_table_holds_what_each_point_gave(swept):
    project, _ = swept
    folder = project.folder / "reports/sweeps/learning_rate-seed"
    table = pd.read_parquet(folder / "points.parquet")
    assert table["point"].tolist() == [1, 2, 3, 4]
    assert table["train.learning_rate"].tolist() == [1e-2, 1e-2, 1e-3, 1e-3]
    assert table["train.seed"].tolist() == [0, 13, 0, 13]
    assert table["state"].tolist() == ["done", "failed", "done", "failed"]
    assert table["tuned_loss"].tolist()[::2] == pytest.approx([2.7, 1.7])
    assert table["loss_change"].tolist()[::2] == pytest.approx([-3.3, -4.3])
    assert table["peak_gb"].tolist()[::2] == [0.5, 0.5]
    assert table["train_seconds"].tolist()[::2] == [0.75, 0.75]
    assert (table["seconds"][::2] > table["train_seconds"][::2]).all()
    assert table["experiment"][2] == "learning_rate-1e-3-seed-0"
    revision = project.run("git", "rev-parse", "--short=12", *_refs(project, "1e-3-seed-0")).output
    assert table["commit"][2] == revision.strip()
    read = pd.read_csv(folder / "points.csv")
    assert read["tuned_loss"].tolist()[::2] == pytest.approx([2.7, 1.7])
    assert "<h1>Sweep learning_rate-seed</h1>" in (folder / "sweep.html").read_text()


def _refs(project, end):
    listed = project.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").output
    return [ref for ref in listed.split() if ref.endswith(end)]


def test_the_best_point_leads_the_board(swept):
    board = swept[1].output.split("the lowest loss first")[1]
    assert board.index("learning_rate-1e-3-seed-0") < board.index("learning_rate-1e-2-seed-0")
    assert "1.7000" in board


def test_the_points_stand_in_dvc_exp_show(swept):
    project, _ = swept
    shown = project.run("dvc", "exp", "show", "--csv").output
    assert "learning_rate-1e-2-seed-0" in shown
    assert "2.7" in shown


@pytest.mark.slow
def test_finished_points_are_not_run_again_and_more_may_come(swept, tmp_path):
    project = swept[0].copy(tmp_path / "project")
    before = set(_refs(project, ""))
    project.run("git", "commit", "-q", "--allow-empty", "-m", "a new starting point")
    words = ("train.learning_rate=1e-2,1e-3,1e-4", "train.num_layers=8", "train.seed=0,13")
    done = sweep(project, "-m", *words[:2], "train.seed=0", "--name", "x", check=False)
    assert done.status == 0  # another name: other experiments
    began = time.time()
    done = sweep(project, "-m", "train.learning_rate=1e-2,1e-4", *words[1:], check=False)
    assert done.status == 1
    assert ran(project, began) == {
        "learning_rate=0.0001 seed=0",
        "learning_rate=0.0001 seed=13",
        "learning_rate=0.01 seed=13",
    }
    made = {ref.split("/")[-1] for ref in set(_refs(project, "")) - before}
    assert "learning_rate-1e-4-seed-0" in made
    assert "learning_rate-1e-2-seed-0" not in made
    table = pd.read_parquet(project.folder / "reports/sweeps/learning_rate-seed/points.parquet")
    earlier = table[table["train.learning_rate"] == 1e-3]
    assert earlier["state"].tolist() == ["done"]  # of the first sweep; its failure is gone


@pytest.mark.slow
def test_a_name_that_other_settings_hold_is_left_to_them(swept, tmp_path):
    project = swept[0].copy(tmp_path / "project")
    words = ("train.learning_rate=1e-2,1e-3", "train.num_layers=4", "train.seed=0,1")
    sweep(project, "-m", *words)
    found = experiments(project)
    assert {"learning_rate-1e-2-seed-0", "learning_rate-1e-2-seed-0-2"} <= found
    table = pd.read_csv(project.folder / "reports/sweeps/learning_rate-seed/points.csv")
    assert table["tuned_loss"].tolist() == pytest.approx([2.8, 2.8, 1.8, 1.8])


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("data/source/mine/train.jsonl", "dvc add data/source/mine && git add"),
        ("conf/train/mine.yaml", "git add conf/train/mine.yaml"),
    ],
)
def test_untracked_files_are_refused_first(project, path, told):
    (project.folder / path).parent.mkdir(parents=True, exist_ok=True)
    (project.folder / path).write_text("seed: 1\n")
    done = sweep(project, "-m", "train.seed=0,1", check=False)
    assert done.status == 2
    assert told in done.output
    assert experiments(project) == set()


@pytest.mark.slow
def test_values_of_an_applied_experiment_are_refused_and_apply_keeps_them(swept, tmp_path):
    project = swept[0].copy(tmp_path / "project")
    project.run("dvc", "exp", "apply", "learning_rate-1e-2-seed-0")
    done = sweep(project, "-m", "train.seed=0,1", check=False)
    assert done.status == 2
    assert "train.learning_rate=0.01" in done.output
    assert "--keep NAME" in done.output
    project.run("git", "checkout", "-q", ".")
    project.run("dvc", "checkout", check=False)
    missing = sweep(project, "--apply", "learning_rate-1e-2-seed-1", check=False)
    assert missing.status == 2
    assert "learning_rate-1e-2-seed-0" in missing.output
    sweep(project, "--apply", "learning_rate-1e-2-seed-0")
    preset = project.text("conf/experiment/learning_rate-1e-2-seed-0.yaml")
    assert "learning_rate: 0.01" in preset
    assert "experiment: learning_rate-1e-2-seed-0" in project.text("conf/config.yaml")
    assert project.json("reports/evaluate/metrics.json")["tuned"]["loss"] == pytest.approx(2.7)
    again = sweep(project, "--apply", "learning_rate-1e-2-seed-0", check=False)
    assert again.status == 2
    assert "--keep ANOTHER_NAME" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_stopped_sweep_goes_on_where_it_was(project, number, launcher):
    words = ["-m", "train.seed=0,100", "train.num_layers=8", f"hydra/launcher={launcher}"]
    process = begun(project, *words)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + number, output
    assert (project.folder / ".cache/pretend-100").read_text() == "SIGINT"
    assert states(project)["seed=100"]["state"] == "stopped"
    assert workspaces(project) == []
    assert _below(project) == []
    (project.folder / ".cache/started").unlink()
    began = time.time()
    again = sweep(project, *words)
    assert "seed=100: done" in again.output
    if launcher == "basic":  # with joblib the other point was stopped too, at some moment
        assert ran(project, began) == {"seed=100"}
    assert experiments(project) == {"seed-0", "seed-100"}
    log = states(project)["seed=100"]["log"]
    with open(log) as file:
        assert "resumed from SIGINT" in file.read()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_killed_sweep_leaves_no_process_and_goes_on(project, launcher):
    words = ["-m", "train.seed=0,100", "train.num_layers=8", f"hydra/launcher={launcher}"]
    process = begun(project, *words)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    until = time.monotonic() + 60
    while _below(project) and time.monotonic() < until:
        time.sleep(0.1)
    assert _below(project) == []
    assert (project.folder / ".cache/pretend-100").exists()
    assert workspaces(project) == []
    sweep(project, *words)
    assert experiments(project) == {"seed-0", "seed-100"}


def _below(project):
    """Processes that work in the project's folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd().startswith(str(project.folder)):
                found.append(process)
    return found


@pytest.mark.slow
def test_one_sweep_at_a_time_has_a_name(project):
    words = ["-m", "train.seed=0,100", "train.num_layers=8"]
    process = begun(project, *words)
    second = sweep(project, *words, check=False)
    assert second.status == 2
    assert f"process {process.pid}" in second.output
    (project.folder / ".cache/go").touch()
    assert process.wait(120) == 0


@pytest.mark.slow
def test_joblib_runs_points_side_by_side_without_a_lock_failure(project):
    words = ["train.seed=1,2,3,4,5,6", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    done = sweep(project, "-m", *words)
    assert "2 points run at a time" in done.output
    assert experiments(project) == {f"seed-{seed}" for seed in range(1, 7)}
    found = states(project).values()
    assert {one["state"] for one in found} == {"done"}
    spans = [(one["started"], one["started"] + one["seconds"]) for one in found]
    assert any(a[0] < b[0] < a[1] for a in spans for b in spans), "never two at a time"


@pytest.mark.slow
def test_submitit_runs_points_and_a_failure_stops_no_other(project):
    words = ["train.seed=0,13,1", "hydra/launcher=submitit_local"]
    done = sweep(project, "-m", *words, check=False)
    assert done.status == 1
    assert experiments(project) == {"seed-0", "seed-1"}
    assert "seed=13: train: This seed is unlucky" in done.output[done.output.rindex("error:") :]


@pytest.mark.slow
def test_ray_runs_points_and_a_failure_stops_no_other(project):
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="the extra ray is absent")
    words = ["train.seed=0,13,1", "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"]
    done = sweep(project, "-m", *words, check=False)
    assert done.status == 1
    assert experiments(project) == {"seed-0", "seed-1"}, done.output[-4000:]
    assert "seed=13: train: This seed is unlucky" in done.output[done.output.rindex("error:") :]


@pytest.mark.slow
def test_a_lock_that_another_command_holds_is_waited_for(project):
    """DVC gives up after three seconds; the point tries again."""
    code = (
        "import sys, time; from dvc.repo import Repo; repo = Repo();\n"
        "with repo.lock: print('held', flush=True); time.sleep(12)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=project.folder,
        env=environment(project.home),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    done = sweep(project, "-m", "train.seed=0,1")
    assert holder.wait(60) == 0
    assert experiments(project) == {"seed-0", "seed-1"}
    assert "Unable to acquire lock" not in done.output


@pytest.mark.slow
def test_optuna_chooses_points_by_what_the_earlier_ones_gave(project):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is absent")
    words = ("sweep=optuna", "hydra.sweeper.n_trials=4")
    sweep(project, *words)
    table = pd.read_csv(project.folder / "reports/sweeps/optuna/points.csv")
    assert len(table) == 4
    assert table["train.learning_rate"].between(3e-5, 1e-3).all()
    assert set(table["train.num_layers"]) <= {4, 8, 16}
    rates, layers = table["train.learning_rate"], table["train.num_layers"]
    expected = 2 + (np.log10(rates) + 3) ** 2 - 0.1 * np.log2(layers)
    assert table["tuned_loss"].tolist() == pytest.approx(expected.tolist())
    began = time.time()
    sweep(project, *words)
    assert ran(project, began) == set()
