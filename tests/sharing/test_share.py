"""Two people, a real bare git repository and a real store; training is pretended."""

import hashlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.project import Project, environment
from tests.sweep import small


@dataclass(frozen=True)
class Team:
    """A project that one person ran, and where it can be shared."""

    one: Project
    origin: Path
    store: Path

    def clone(self, name: str, home: str = "") -> Project:
        """A colleague's clone, with caches of its own."""
        folder = self.origin.parent / name
        subprocess.run(["git", "clone", "-q", self.origin, folder], check=True)
        return Project(folder, self.origin.parent / (home or f"home-{name}"))


def share(project, *words, **options):
    return project.run("python", "-m", "stages", "share", *words, **options)


def join(project, *words, **options):
    return project.run("python", "-m", "stages", "join", *words, **options)


def team(folder: Path, source: Project) -> Team:
    """A copy of a project that was run, with an empty bare repository as its origin."""
    one = source.copy(folder / "one")
    origin = folder / "origin.git"
    subprocess.run(["git", "init", "-q", "--bare", origin], check=True)
    one.run("git", "remote", "add", "origin", str(origin))
    return Team(one, origin, folder / "store")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The small project, run and committed."""
    project = small.make(
        tmp_path_factory.mktemp("ran") / "project", tmp_path_factory.mktemp("home")
    )
    project.run("python", "-m", "stages.compose")
    project.repro()
    project.commit()
    return project


@pytest.fixture(scope="module")
def shared(ran, tmp_path_factory):
    """A project that was shared; for tests that only look, or that clone."""
    made = team(tmp_path_factory.mktemp("shared"), ran)
    return made, share(made.one, "--store", "../store")


@pytest.fixture
def fresh(ran, tmp_path):
    return team(tmp_path, ran)


def test_the_store_gets_its_absolute_path_and_is_committed(shared):
    made, done = shared
    assert f"url = {made.store}" in made.one.text(".dvc/config")
    assert made.one.run("git", "status", "--porcelain").output == ""
    assert str(made.store) in done.output
    head = made.one.run("git", "rev-parse", "HEAD").output
    there = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=made.origin, capture_output=True, text=True, check=True
    )
    assert there.stdout == head


def test_a_colleague_joins_and_runs_nothing(shared):
    made, _ = shared
    two = made.clone("two")
    done = join(two)
    assert "`dvc repro --pull` runs nothing" in done.output
    assert two.repro("--pull").stages == []
    for file in ("reports/train/run.json", "reports/evaluate/metrics.json", "dvc.lock"):
        assert (two.folder / file).read_bytes() == (made.one.folder / file).read_bytes()


@pytest.mark.slow
def test_a_store_at_another_place_stays_this_machine_s(shared, tmp_path):
    made, _ = shared
    elsewhere = tmp_path / "mounted"
    shutil.copytree(made.store, elsewhere)
    three = made.clone("three")
    before = three.text(".dvc/config")
    done = join(three, "--store", str(elsewhere))
    assert str(elsewhere) in done.output
    assert three.text(".dvc/config") == before
    assert three.run("git", "status", "--porcelain").output == ""


@pytest.mark.parametrize(
    "whole",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["the list of a folder", "one of its files"],
)
def test_a_store_without_a_file_says_which_and_who_can_help(shared, tmp_path, whole):
    made, _ = shared
    poor = tmp_path / "poor"
    shutil.copytree(made.store, poor)
    out = yaml.safe_load(made.one.text("dvc.lock"))["stages"]["train"]["outs"][0]["md5"]
    file = (made.one.folder / "reports/train/run.csv").read_bytes()
    name = out if whole else hashlib.md5(file).hexdigest()
    (poor / "files/md5" / name[:2] / name[2:]).unlink()
    four = made.clone(f"poor-{whole}")
    done = join(four, "--store", str(poor), check=False)
    assert done.status == 2
    assert "The store lacks files that dvc.lock names" in done.output
    assert "found:    reports/train" in done.output
    assert "make share" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda p: p.edit("conf/train/lora.yaml", "seed: 0", "seed: 1"),
            "git add -u && git commit",
        ),
        (lambda p: (p.folder / "data/source/mine.jsonl").write_text("{}"), "dvc add data/source/"),
        (
            lambda p: (
                p.run("dvc", "remote", "add", "-d", "x", "s3://b", "-q")
                and p.run("dvc", "remote", "modify", "x", "secret_access_key", "hunter2")
            ),
            'remote "x": secret_access_key',
        ),
        (lambda p: p.run("git", "remote", "remove", "origin"), "git remote add origin ADDRESS"),
        (lambda p: None, "make share STORE="),
    ],
    ids=["edited", "rows", "secret", "no-origin", "no-store"],
)
def test_what_a_clone_would_lack_or_must_not_see_is_refused(fresh, spoil, told):
    spoil(fresh.one)
    done = share(fresh.one, check=False)
    assert done.status == 2
    assert told in done.output
    assert "hunter2" not in done.output
    assert not list(fresh.origin.glob("refs/heads/*"))


@pytest.mark.slow
def test_a_swept_point_travels_and_is_not_run_again(fresh):
    line = ("-m", "train.learning_rate=1e-2,1e-3", "train.num_layers=8")
    share(fresh.one, "--store", str(fresh.store))
    small.sweep(fresh.one, *line)
    done = share(fresh.one, "learning_rate-1e-2")
    assert "dvc exp pull" in done.output
    two = fresh.clone("two")
    assert "shared experiments: learning_rate-1e-2;" in join(two).output
    two.run("dvc", "exp", "pull", "--run-cache", "origin", "learning_rate-1e-2")
    began = time.time()
    small.sweep(two, *line)
    assert small.ran(two, began) == {"learning_rate=0.001"}
    two.run("dvc", "exp", "apply", "learning_rate-1e-2")
    assert two.json("reports/evaluate/metrics.json")["tuned"]["loss"] == pytest.approx(2.7)
    assert two.repro("--pull").stages == []


@pytest.mark.slow
def test_an_experiment_that_is_older_than_the_store_is_refused(fresh):
    fresh.one.experiment("train.seed=1", name="old")
    fresh.one.run("git", "checkout", "-q", ".")
    done = share(fresh.one, "--store", str(fresh.store), "old", check=False)
    assert done.status == 2
    assert "dvc exp remove old" in done.output
    unknown = share(fresh.one, "odl", check=False)
    assert (unknown.status, "There is no such experiment" in unknown.output) == (2, True)


@pytest.mark.slow
def test_who_pushes_second_is_told_and_both_end_up_with_everything(fresh):
    """Both train, both push at once; dvc.lock conflicts and either side will do."""
    share(fresh.one, "--store", str(fresh.store))
    two = fresh.clone("two")
    join(two)
    for project, seed in ((fresh.one, 1), (two, 2)):
        project.edit("conf/train/lora.yaml", "seed: 0", f"seed: {seed}")
        project.run("python", "-m", "stages.compose")
        project.repro()
        project.commit()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "stages", "share"],
            cwd=project.folder,
            env=environment(project.home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for project in (fresh.one, two)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in started]
    ended = [process.returncode for process in started]
    assert sorted(ended) == [0, 2], outputs
    late = (fresh.one, two)[ended.index(2)]
    told = outputs[ended.index(2)]
    assert "A colleague has pushed before you" in told
    pull = next(line for line in told.splitlines() if "git pull" in line)
    words = pull.split("to do:")[1].split(";")[0].split()
    assert late.run(*words, check=False).status != 0
    late.run("git", "checkout", "--ours", "dvc.lock", "params.yaml", "conf", check=False)
    late.run("git", "checkout", "--ours", "reports/evaluate/metrics.json", check=False)
    late.run("dvc", "repro", "--pull")
    late.commit()
    assert "make join" in share(late).output


@pytest.mark.slow
def test_restored_outputs_are_links_into_the_cache(shared, tmp_path):
    """A clone's pull, or the stages before training that a point takes from DVC's cache."""
    made, _ = shared
    if _reflinks(tmp_path):
        pytest.skip("this file system copies on write, which nothing can see")
    five = made.clone("five")
    join(five)
    file = five.folder / "reports/train/run.csv"
    assert file.stat().st_nlink == 2
    assert five.repro().stages == []


def _reflinks(folder):
    """Whether this file system copies on write."""
    source = folder / "a"
    source.write_text("x")
    option = "-c" if sys.platform == "darwin" else "--reflink=always"
    words = ["cp", option, str(source), str(folder / "b")]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0
