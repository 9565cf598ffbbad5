"""What breaks a sweep from outside: another one, a full disk, the death of a point's training."""

import contextlib
import json
import resource
import subprocess
import sys

import psutil
import pytest

from tests.project import environment
from tests.sweep import small
from tests.sweep.pretend import LARGE
from tests.sweep.small import begun, experiments, states, sweep, workspaces

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path):
    return small.make(tmp_path / "project", tmp_path / "home")


def started(project, *words, **options):
    """A sweep that goes on by itself."""
    return subprocess.Popen(
        [sys.executable, "-m", "stages", "sweep", *words],
        cwd=project.folder,
        env=environment(project.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_two_sweeps_at_once_take_turns_with_dvc(project):
    both = [
        started(project, "--name", name, "-m", "train.seed=1,2", f"train.num_layers={layers}")
        for name, layers in (("a", 4), ("b", 8))
    ]
    said = [one.communicate(timeout=280)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], "\n".join(said)
    assert experiments(project) == {"a-seed-1", "a-seed-2", "b-seed-1", "b-seed-2"}
    assert "Unable to acquire lock" not in "".join(said)
    assert workspaces(project) == []
    for name, loss in (("a", 2.8), ("b", 2.7)):  # by hand: 2 + (log10(1e-4) + 3)² − 0.1·log2
        revision = project.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").output
        ref = next(x for x in revision.split() if x.endswith(f"{name}-seed-1"))
        shown = project.run("git", "show", f"{ref}:reports/evaluate/metrics.json").output
        assert json.loads(shown)["tuned"]["loss"] == pytest.approx(loss)


def test_a_full_disk_fails_its_point_and_stops_no_other(project):
    limit = LARGE // 2
    process = started(
        project,
        *("-m", "train.seed=1,14,2"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    said = process.communicate(timeout=280)[0]
    assert process.returncode == 1, said
    assert experiments(project) == {"seed-1", "seed-2"}
    found = states(project)["seed=14"]
    assert found["state"] == "failed"
    assert "Traceback" not in said
    assert "under the limit on file sizes (`ulimit -f`)" in found["reason"]
    assert workspaces(project) == []
    assert list((project.folder / ".cache").glob("*large*")) == []
    sweep(project, "-m", "train.seed=1,14,2")  # once there is room
    assert experiments(project) == {"seed-1", "seed-2", "seed-14"}


def test_a_training_that_is_killed_fails_its_point_and_goes_on_next_time(project):
    words = ("-m", "train.seed=100,1", "train.num_layers=8")
    process = begun(project, *words)
    _training(project).kill()
    said = process.communicate(timeout=280)[0]
    assert process.returncode == 1, said
    assert experiments(project) == {"seed-1"}
    assert states(project)["seed=100"]["state"] == "failed"
    assert "seed=100" in said[said.rindex("error:") :]
    assert workspaces(project) == []
    (project.folder / ".cache/go").touch()
    sweep(project, *words)
    assert experiments(project) == {"seed-1", "seed-100"}


def _training(project):
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            inside = process.cwd().startswith(str(project.folder))
            if inside and process.cmdline()[-2:] == ["pretend", "train"]:
                return process
    return pytest.fail("nothing trains")
