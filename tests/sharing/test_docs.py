"""Every command of docs/sweeps.md, teams.md and upgrade.md, as written there, in its order."""

import importlib.util
import shlex
import subprocess
import sys

import pytest

from tests.project import Project
from tests.sharing.blocks import commands
from tests.sharing.test_share import team
from tests.sweep import small

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path):
    """The small project on the branch main, its presets cut to two points, run and committed."""
    made = small.make(tmp_path / "project", tmp_path / "home")
    made.run("git", "branch", "-m", "main")
    made.edit("conf/sweep/learning_rate.yaml", "3e-5,1e-4,3e-4,1e-3", "1e-4,3e-4")
    made.edit("conf/sweep/layers.yaml", "4,8,16,-1", "4,8")
    made.run("python", "-m", "stages.compose")
    made.repro()
    made.commit()
    return made


def with_make(project):
    """Give a project this interpreter's environment, as `make setup` would."""
    (project.folder / ".venv").symlink_to(sys.prefix)
    if "pip" in project.run("make", "-n", "repro").output:
        pytest.skip("this interpreter's environment was not made by `make setup`")


def run(project, line, **options):
    """A line of a page as a shell runs it."""
    return project.run("bash", "-c", line, **options)


def test_sweeps(project):
    for line in commands("sweeps.md"):
        if "submitit_slurm" in line:  # needs a cluster; tests/sweep/test_plan.py composes it
            continue
        if "sweep=optuna" in line and not importlib.util.find_spec("optuna"):
            done = run(project, line, check=False)
            assert (done.status, "pip install hydra-optuna" in done.output) == (2, True)
            continue
        done = run(project, line)
        if line == "dvc repro":
            assert done.stages == []
            assert "experiment: rates-learning_rate-3e-4" in project.text("conf/config.yaml")
    found = small.experiments(project)
    assert {"learning_rate-1e-4-rank-8", "num_layers-4", "rates-learning_rate-3e-4"} <= found


def test_teams(project, tmp_path):
    made = team(tmp_path / "team", project)
    one, lines = made.one, commands("teams.md")
    with_make(one)
    address = str(made.origin)
    first = lines.index("dvc repro --pull")
    assert lines[first - 1] == "git clone ADDRESS project && cd project && make join"
    for line in lines[: first - 1]:
        if "ARGS=" in line:
            small.sweep(one, "sweep=learning_rate")
        run(one, line.replace("ADDRESS", address))
    subprocess.run(["git", "-C", address, "symbolic-ref", "HEAD", "refs/heads/main"], check=True)
    two = made.clone("two")
    with_make(two)
    run(two, "make join")
    assert run(two, lines[first]).stages == []
    local = next(line for line in lines if line.startswith("dvc remote"))
    for line in lines[first + 1 : lines.index(local)]:
        run(two, line)
    assert run(two, lines[first]).stages == []
    bucket = Project(tmp_path / "bucket", project.home)
    subprocess.run(["git", "clone", "-q", address, bucket.folder], check=True)
    bucket.run("dvc", "remote", "add", "-f", "-d", "store", "s3://bucket/folder")
    run(bucket, local)
    assert "TEAM" not in bucket.text(".dvc/config")
    for person, seed in ((one, 1), (two, 2)):
        person.run("git", "checkout", "-q", ".")
        person.edit("conf/train/lora.yaml", "seed: 0", f"seed: {seed}")
        person.run("python", "-m", "stages.compose")
        person.repro()
        person.run("git", "commit", "-qam", "another seed")
    run(one, "make share")
    refused = run(two, "make share", check=False)
    assert "A colleague has pushed before you" in refused.output
    pull, *rest = lines[lines.index(local) + 1 :]
    assert pull in refused.output
    assert run(two, pull, check=False).status == 1
    two.run("git", "checkout", "--ours", "conf")
    for line in rest:
        run(two, line)
    assert two.repro().stages == []


def test_upgrade(project, tmp_path):
    made = team(tmp_path / "team", project)
    one, lines = made.one, commands("upgrade.md")
    one.run("git", "push", "-q", "origin", "main")
    with_make(one)
    one.edit("pretend.py", "BASE = 6.0", "BASE = 6.0  # nats")
    status, commit, *rest = lines
    assert "changed deps" in run(one, status).output
    run(one, commit)
    assert "up to date" in run(one, status).output
    assert one.repro().stages == []
    one.run("git", "commit", "-qam", "a comment")
    for line in rest:
        done = run(one, line.replace("ADDRESS", shlex.quote(str(made.origin))))
        assert [stage for stage in done.stages if stage != "compose"] == []
