"""Exit statuses, and the message that survives a deleted workspace."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from stages.core import entry
from stages.core.errors import UserError


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield tmp_path
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


def last_error(project):
    return json.loads((project / ".cache" / "last_error.json").read_text())


STAGES = (
    "collect", "model", "tokenize", "split", "validate", "train", "evaluate", "report", "compose",
)  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_says_what_it_does_anywhere(tmp_path, stage):
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{stage}", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m stages.{stage}")
    assert "batch_size" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_stage_by_hand_says_that_an_earlier_one_was_not_done(project, capsys, monkeypatch):
    monkeypatch.delenv("DVC_STAGE", raising=False)
    warning = "collect was begun and not done"

    def fails():
        raise UserError("bad row")

    assert entry.guarded("collect", fails) == 2
    capsys.readouterr()
    for name, said in (("model", False), ("tokenize", True), ("plan", False)):
        assert entry.guarded(name, lambda: None) == 0
        assert (warning in capsys.readouterr().err) == said, name
    monkeypatch.setenv("DVC_STAGE", "tokenize")  # DVC removed the outputs of the one that failed
    entry.guarded("tokenize", lambda: None)
    monkeypatch.delenv("DVC_STAGE")
    entry.guarded("collect", lambda: None)
    entry.guarded("tokenize", lambda: None)
    assert warning not in capsys.readouterr().err


def test_a_killed_stage_counts_as_not_done(project, capsys, monkeypatch):
    monkeypatch.delenv("DVC_STAGE", raising=False)
    code = (
        "import os\nfrom stages.core import entry\n"
        "entry.guarded('split', lambda: os.kill(os.getpid(), 9))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    entry.guarded("validate", lambda: None)
    assert "split was begun and not done" in capsys.readouterr().err


def test_done_is_0(project):
    assert entry.guarded("x", lambda: None) == 0


def test_what_the_user_can_mend_is_2_without_traceback(project, capsys):
    def work():
        raise UserError("No rows", where="a.jsonl, line 3", found=0, expected="1", fix="add rows")

    assert entry.guarded("collect", work) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.rstrip().endswith("add rows")
    kept = last_error(project)
    assert (kept["stage"], kept["status"], kept["where"]) == ("collect", 2, "a.jsonl, line 3")
    assert kept["found"] == "0"


def test_anything_else_is_1_with_its_traceback_kept(project, capsys):
    assert entry.guarded("x", lambda: 1 // 0) == 1
    assert "ZeroDivisionError" in last_error(project)["traceback"]


def test_a_full_disk_is_2(project):
    def work():
        raise OSError(28, "No space left on device")

    assert entry.guarded("x", work) == 2


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, "read and write"), (errno.EROFS, "written to"), (errno.EISDIR, "a file")],
    ids=["rights", "read-only", "folder"],
)
def test_a_file_that_the_system_refuses_is_2_and_named(project, capsys, number, words):
    def work():
        raise OSError(number, os.strerror(number), "data/raw")

    assert entry.guarded("x", work) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and "data/raw" in shown and words in shown
    assert all(last_error(project)[part] for part in ("where", "found", "expected", "fix"))


def test_a_refusal_that_concerns_no_file_stays_a_failure(project):
    def work():
        raise PermissionError(errno.EPERM, "no such right")

    assert entry.guarded("x", work) == 1


def test_a_limit_on_file_sizes_is_2_and_leaves_nothing_behind(project):
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom stages.core import entry, files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "sys.exit(entry.guarded('x', lambda: files.write_text(Path('big'), 'x' * 50_000)))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "ulimit -f" in done.stderr
    assert sorted(path.name for path in project.iterdir()) == [".cache"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_unwind_and_end_with_128_plus_their_number(project, number, status):
    code = (
        "import sys, time\nfrom stages.core import entry\n"
        "def work():\n    try:\n        print('ready', flush=True); time.sleep(30)\n"
        "    finally:\n        open('unwound', 'w').close()\n"
        "sys.exit(entry.guarded('x', work))"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=10) == status
    assert (project / "unwound").exists()


def test_a_stage_refuses_mathematics_on_its_command_line(project):
    (project / "params.yaml").write_text("model: {repo: 'builtin:tiny'}\ntrain: {updates: 1}\n")
    seen = []
    assert entry.stage("x", seen.append, ["train.updates=5"]) == 2
    assert entry.stage("x", seen.append, ["memory.budget_gb=5"]) == 0
    assert seen[0].memory.budget_gb == 5


def test_a_start_sweeps_what_a_killed_one_left_of_its_own_outputs(project):
    left = ["data/.tmp-raw-0123abcd/train.parquet", "reports/.tmp-collect.json-0123abcd"]
    others = ["data/.tmp-tokens-0123abcd/x", "reports/.tmp-prove.json-1", ".tmp-out-1/x"]
    for name in (*left, *others):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("half")
    (project / "params.yaml").write_text("model: {repo: 'builtin:tiny'}\ntrain: {updates: 5}\n")
    assert entry.stage("collect", lambda settings: None, []) == 0
    assert not any((project / name).exists() for name in left)
    assert all((project / name).exists() for name in others)


def test_every_output_of_the_pipeline_is_swept():
    root = Path(__file__).parents[2]
    stages = yaml.safe_load((root / "dvc.yaml").read_text())["stages"]
    for stage, entries in stages.items():
        if stage == "compose":
            continue
        outs = [*entries.get("outs", []), *entries.get("metrics", [])]
        names = [out if isinstance(out, str) else next(iter(out)) for out in outs]
        for name in names:
            covered = [
                out for out in entry.OUTPUTS[stage] if name == out or name.startswith(f"{out}/")
            ]
            assert covered, f"{stage}: {name}"
