"""The real pipeline in a real git and DVC repository: what runs, and what must not run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import yaml

from tests import project as projects
from tests.project import environment

ALL = [
    "compose",
    "collect",
    "model",
    "tokenize",
    "split",
    "validate",
    "train",
    "evaluate",
    "report",
]
RATE = ("conf/experiment/smoke.yaml", "learning_rate: 1e-3", "learning_rate: 2e-3")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke experiment, run once to its report and committed; `first` is that run."""
    home = tmp_path_factory.mktemp("home")
    made = projects.make(tmp_path_factory.mktemp("smoke") / "project", home)
    made.edit("conf/config.yaml", "experiment: null", "experiment: smoke")
    first = made.repro()
    made.commit()
    return made, first


@pytest.fixture
def project(smoke, tmp_path):
    """A copy of the finished smoke project, for one test to change."""
    return smoke[0].copy(tmp_path / "project")


def params(project):
    return yaml.safe_load(project.text("params.yaml"))


def test_one_command_makes_everything_in_order(smoke):
    project, first = smoke
    assert sorted(first.stages) == sorted(ALL)
    assert first.stages.index("compose") == 0
    assert first.stages[-3:] == ["train", "evaluate", "report"]
    for stage in yaml.safe_load(project.text("dvc.yaml"))["stages"].values():
        for out in [*stage["outs"], *stage.get("metrics", [])]:
            path = out if isinstance(out, str) else next(iter(out))
            assert (project.folder / path).exists(), path
    metrics = project.json("reports/evaluate/metrics.json")
    assert metrics["tuned"]["loss"] < metrics["base"]["loss"]
    assert not list(project.folder.rglob(".tmp-*"))


def test_git_holds_the_lock_the_params_and_the_metric_and_nothing_else(smoke):
    project, _ = smoke
    assert project.run("git", "status", "--porcelain").output == ""
    tracked = set(project.run("git", "ls-files").output.split())
    here = subprocess.run(
        ["git", "ls-files"], cwd=projects.ROOT, capture_output=True, text=True, check=True
    )
    outputs = {"dvc.lock", "params.yaml", "reports/evaluate/metrics.json"}
    assert tracked - set(here.stdout.split()) <= outputs
    assert outputs <= tracked


def test_a_second_run_does_nothing_and_is_quick(project):
    project.repro()  # DVC learns the copied files
    again = project.repro()
    assert again.stages == []
    assert "up to date" in again.output
    assert again.cpu_s < 2


def test_a_second_make_repro_does_nothing_and_is_quick(project):
    (project.folder / ".venv").symlink_to(sys.prefix)
    if "pip" in project.run("make", "-n", "repro").output:
        pytest.skip("this interpreter's environment was not made by `make setup`")
    project.repro()
    again = project.run("make", "repro")
    assert "up to date" in again.output
    assert again.cpu_s < 5


def test_an_edit_of_the_rate_runs_train_evaluate_report_in_one_pass(project):
    project.edit(*RATE)
    assert project.repro().stages == ["compose", "train", "evaluate", "report"]
    assert params(project)["train"]["learning_rate"] == 0.002
    assert project.repro().stages == []
    project.edit(RATE[0], RATE[2], RATE[1])
    back = project.repro()
    assert back.stages == ["compose"], "the run before stands in DVC's cache"
    assert project.repro().stages == []


def test_dvc_sees_a_key_where_dvc_yaml_names_it(project):
    project.run("python", "-m", "stages.compose", "tokenize.train_on=all", "memory.batch_size=2")
    status = json.loads(project.run("dvc", "status", "--json").output.splitlines()[-1])
    by_params = {
        stage
        for stage, changes in status.items()
        for change in changes
        if isinstance(change, dict) and "params.yaml" in change.get("changed deps", {})
    }
    assert by_params == {"tokenize", "evaluate", "report"}


def test_an_edit_of_one_package_runs_that_stage_and_stops_where_nothing_changed(project):
    file = project.folder / "stages/split/__main__.py"
    file.write_text(file.read_text() + "# a comment\n")
    assert project.repro().stages == ["split"]


# Where the model lies on this machine; what it holds stands in data/model.json.
PLACE = {"model.path", "model.repo", "model.revision"}


@pytest.mark.slow
def test_no_stage_reads_a_setting_that_dvc_yaml_does_not_track(project):
    stages = yaml.safe_load(project.text("dvc.yaml"))["stages"]
    untracked = {}
    for stage in ALL[1:]:
        project.run("python", "-m", "tests.watch", stage, "read.json")
        names = [name for name in stages[stage]["params"] if isinstance(name, str)]
        read = {key for key in project.json("read.json") if not key.startswith(("memory.", "run."))}
        assert read or stage == "train", f"{stage} read nothing: the watch is broken"
        tracked = {key for key in read if any(f"{key}.".startswith(f"{name}.") for name in names)}
        untracked[stage] = sorted(read - tracked - (set() if stage == "model" else PLACE))
    assert {stage: keys for stage, keys in untracked.items() if keys} == {}


@pytest.mark.slow
def test_a_chat_template_and_adapters_that_change_run_what_reads_them(project):
    files = (project.folder / ".cache/models").glob("*/tokenizer_config.json")
    template = json.loads(next(files).read_text())["chat_template"]
    own = project.folder / "conf/templates/own.jinja"
    own.write_text(template)
    shutil.copytree(project.folder / "adapters", project.folder / "data/adapters/first")
    project.edit(
        "conf/experiment/smoke.yaml",
        RATE[1],
        f"{RATE[1]}\n  initial_adapters: data/adapters/first",
    )
    with open(project.folder / "conf/experiment/smoke.yaml", "a") as file:
        file.write("\ntokenize:\n  chat_template: conf/templates/own.jinja\n")
    assert {"tokenize", "train", "evaluate"} <= set(project.repro().stages)
    assert project.repro().stages == []
    own.write_text(template + "{# the same words #}")
    found = project.repro().stages
    assert {"tokenize", "evaluate"} <= set(found)
    assert "collect" not in found
    weights = project.folder / "data/adapters/first/adapters.safetensors"
    weights.write_bytes(_shifted(weights.read_bytes()))
    assert project.repro().stages[:2] == ["validate", "train"]


def _shifted(data: bytes) -> bytes:
    """The last number of a safetensors file, a little larger."""
    last = np.frombuffer(data[-4:], np.float32) + np.float32(0.01)
    return data[:-4] + last.tobytes()


def test_an_edit_of_code_that_changes_no_result_runs_nothing(project):
    for name in (
        "stages/core/console.py",
        "stages/core/memory/plan.py",
        "stages/commands/doctor.py",
    ):
        file = project.folder / name
        file.write_text(file.read_text() + "# a comment\n")
    (project.folder / "stages/train/__pycache__").mkdir(exist_ok=True)
    (project.folder / "stages/train/__pycache__/x.pyc").write_bytes(b"x")
    assert project.repro().stages == []


def test_another_engine_runs_what_it_may_change_and_another_line_nothing(project):
    file = project.folder / "pyproject.toml"
    file.write_text(file.read_text().replace('version = "0.1.0"', 'version = "0.2.0"', 1))
    assert project.repro("--dry").stages == []
    pinned = yaml.safe_load(project.text("dvc.lock"))["stages"]["train"]["params"]
    version = pinned["pyproject.toml"]["tool.samestep.engine"]["mlx"]
    file.write_text(file.read_text().replace(f'mlx = "{version}"', 'mlx = "9.9.9"', 1))
    status = json.loads(project.run("dvc", "status", "--json").output.splitlines()[-1])
    assert set(status) == {"model", "train", "evaluate", "report"}


def test_a_wrong_key_in_conf_stops_before_anything_runs(project):
    project.edit("conf/train/lora.yaml", "seed: 0", "sead: 0")
    done = project.repro(check=False)
    assert done.status == 255
    assert done.stages == ["compose"]
    assert "nearest known key: train.seed" in done.output
    assert "Traceback" not in done.output
    assert project.json(".cache/last_error.json")["stage"] == "compose"


@pytest.mark.parametrize(
    ("override", "words", "stages"),
    [
        ("train.learning_rate=abc", "could not be converted to Float", []),
        pytest.param(
            "train.learnig_rate=1", "'learnig_rate' not in 'Train'", [], marks=pytest.mark.slow
        ),
        pytest.param(
            "+train.learnig_rate=1", "key: train.learning_rate", ["compose"], marks=pytest.mark.slow
        ),
        ("train.learning_rate=-1", "train.learning_rate: at least 0", ["compose"]),
    ],
)
def test_an_experiment_with_a_wrong_value_is_refused(project, override, words, stages):
    done = project.experiment(override, check=False)
    assert (done.status, done.stages) == (255, stages)
    assert words in done.output
    assert project.repro().stages == stages
    assert params(project)["train"]["learning_rate"] == 0.001


@pytest.mark.slow
def test_a3_memory_and_run_settings_run_no_stage_but_compose(project):
    (project.folder / "local.yaml").write_text("memory: {batch_size: 1}\nrun: {keep_last: 3}\n")
    assert project.repro().stages == []
    assert project.run("git", "status", "--porcelain").output == ""
    project.edit("conf/memory/auto.yaml", "grad_checkpoint: auto", "grad_checkpoint: true")
    project.edit("conf/run/default.yaml", "updates_per_save: 50", "updates_per_save: 10")
    assert project.repro().stages == ["compose"]
    project.commit()
    assert set(project.experiment("memory.batch_size=2").stages) <= {"compose"}
    assert project.repro().stages == []


@pytest.mark.slow
def test_an_experiment_its_memory_and_a6(project, tmp_path):
    """A point is run, kept while memory changes, and never lost to an edit of mathematics."""
    ran = project.experiment("train.learning_rate=3e-3")
    assert ran.stages == ["compose", "train", "evaluate", "report"]
    assert project.repro().stages == []
    project.edit("conf/memory/auto.yaml", "batch_size: auto", "batch_size: 2")
    assert project.repro().stages == ["compose"]
    assert params(project)["train"]["learning_rate"] == 0.003
    assert params(project)["memory"]["batch_size"] == 2

    project.edit("conf/experiment/smoke.yaml", "samples: 1", "samples: 2")
    stopped = project.repro(check=False)
    assert (stopped.status, stopped.stages) == (255, ["compose"])
    for words in ("train.learning_rate=0.003 (conf/ says 0.001)", "--keep NAME", "--drop"):
        assert words in stopped.output
    assert params(project)["train"]["learning_rate"] == 0.003

    dropped = project.copy(tmp_path / "dropped")
    dropped.run("python", "-m", "stages.compose", "--drop")
    assert params(dropped)["train"]["learning_rate"] == 0.001
    project.run("python", "-m", "stages.compose", "--keep", "best")
    assert params(project)["train"]["learning_rate"] == 0.003
    assert project.repro().stages == ["compose", "evaluate", "report"]
    assert params(project)["evaluate"]["samples"] == 2


@pytest.mark.slow
def test_a6_a_point_run_aside_and_applied(project):
    words = ["--temp", "-n", "aside", "-S", "train.learning_rate=3e-3"]
    ran = project.run("dvc", "exp", "run", *words)
    assert ran.stages == ["compose", "train", "evaluate", "report"]
    assert params(project)["train"]["learning_rate"] == 0.001
    project.run("dvc", "exp", "apply", "aside")
    assert params(project)["train"]["learning_rate"] == 0.003
    assert project.repro().stages == []
    project.edit("conf/experiment/smoke.yaml", "updates: 6", "updates: 5")
    stopped = project.repro(check=False)
    assert stopped.status == 255
    assert "train.learning_rate=0.003" in stopped.output


def test_a4_a_clone_pulls_and_runs_nothing(project, tmp_path):
    store = tmp_path / "store"
    project.run("dvc", "remote", "add", "-d", "store", str(store))
    project.commit()
    project.run("dvc", "push", "--run-cache")
    clone = tmp_path / "clone"
    project.run("git", "clone", "-q", str(project.folder), str(clone))
    joined = projects.Project(clone, project.home)
    assert joined.repro("--pull").stages == []
    for file in ("reports/evaluate/metrics.json", "adapters/adapters.safetensors"):
        assert (clone / file).read_bytes() == (project.folder / file).read_bytes()


def drawn(project, *words):
    """Every point that `dvc plots` draws: plot → points, each with its revision `rev`."""
    output = project.run("dvc", "plots", *words, "--json").output
    plots = json.loads(output[output.index("{") :].splitlines()[0])["data"]
    return {name: one["content"]["data"]["values"] for name, (one,) in plots.items()}


@pytest.mark.slow
def test_plots_of_one_run_and_between_two_experiments(project):
    shown = drawn(project, "show")
    assert set(shown) == {"loss", "learning rate", "gradient norm"}
    tables = {}
    for name in ("history", "valid"):
        header, *lines = project.text(f"reports/train/{name}.csv").split()
        tables[name] = [
            dict(zip(header.split(","), line.split(","), strict=True)) for line in lines
        ]
    wanted = {row["loss"] for rows in tables.values() for row in rows}
    assert {str(point["loss"]) for point in shown["loss"]} == wanted
    norms = {row["grad_norm"] for row in tables["history"]}
    assert {str(point["grad_norm"]) for point in shown["gradient norm"]} == norms

    rates = {"hot": 0.005, "cold": 0.0001}
    for name, rate in rates.items():
        project.experiment(f"train.learning_rate={rate}", name=name)
    between = drawn(project, "diff", *rates)
    for points in between.values():
        assert {point["rev"] for point in points} == set(rates)
    for name, rate in rates.items():
        own = [float(p["learning_rate"]) for p in between["learning rate"] if p["rev"] == name]
        assert max(own) == pytest.approx(rate)


@pytest.mark.slow
def test_a7_the_orphan_of_a_killed_dvc_ends_and_the_next_run_goes_on(project):
    project.edit("conf/experiment/smoke.yaml", "updates: 6", "updates: 1500")
    project.edit("conf/run/default.yaml", "updates_per_save: 50", "updates_per_save: 5")
    dvc = subprocess.Popen(
        ["dvc", "repro"],
        cwd=project.folder,
        env=environment(project.home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workers = _wait_for_training(dvc, project.folder)
    os.kill(dvc.pid, signal.SIGKILL)
    dvc.wait()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == [], "an orphan trains on"
    assert not (project.folder / "adapters").exists()
    project.edit("conf/experiment/smoke.yaml", "updates: 1500", "updates: 6")
    assert project.repro().status == 0
    assert (project.folder / "adapters/adapters.safetensors").exists()


def _wait_for_training(dvc, folder):
    """The processes below dvc, once train has written a checkpoint."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert dvc.poll() is None, "dvc ended before training"
        if list((folder / ".cache/checkpoints").glob("*/*/state.json")):
            return psutil.Process(dvc.pid).children(recursive=True)
        time.sleep(0.2)
    pytest.fail("no checkpoint after two minutes")


def test_without_a_git_repository_make_says_so(tmp_path):
    project = projects.make(tmp_path / "project", tmp_path / "home", commit=False)
    for goal in ("repro", "test"):
        done = project.run("make", goal, check=False)
        assert done.status == 2
        assert "error: there is no git repository here" in done.output
        assert "git init" in done.output


def test_a_python_too_old_is_named(tmp_path):
    project = projects.make(tmp_path / "project", tmp_path / "home")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        program = programs / name
        program.write_text('#!/bin/sh\ntest "$1" = --version && echo Python 3.9.1\n')
        program.chmod(0o755)
    done = project.run("env", f"PATH={programs}:/usr/bin:/bin", "make", "setup", check=False)
    assert done.status == 2
    assert "found:    Python 3.9.1" in done.output
    assert "expected: Python 3.11 to 3.14" in done.output


def test_without_its_packages_a_stage_says_what_to_activate(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-m", "stages.collect"],
        cwd=projects.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "packages are missing" in done.stderr
    assert "source .venv/bin/activate" in done.stderr
    assert "Traceback" not in done.stderr
