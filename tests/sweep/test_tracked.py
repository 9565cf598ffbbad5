"""What git does not know is refused with the line that mends it; git repositories made here."""

import subprocess

import pytest

from stages.commands.sharing import git, tracked
from stages.core.errors import UserError

DVC_YAML = """\
stages:
  compose: {cmd: x, deps: [conf, stages/compose], outs: [params.yaml]}
  collect: {cmd: x, deps: [data/source, stages/collect], outs: [data/raw]}
  train: {cmd: x, deps: [data/raw, stages/train], outs: [adapters, {reports/train: {cache: false}}]}
  report: {cmd: x, deps: [adapters/config.json, reports/train, stages/report], outs: [page]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "someone@example.org")
    write(tmp_path, "dvc.yaml", DVC_YAML)
    write(tmp_path, "data/source/README.md", "rows")
    write(tmp_path, "data/source/toy/train.jsonl", "{}")
    write(tmp_path, "stages/train/loop.py", "x = 1\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def write(folder, path, text):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


def refused(check, folder):
    with pytest.raises(UserError) as caught:
        check(folder)
    return caught.value


def test_tracked_rows_pass(folder):
    tracked.require_rows(folder)
    write(folder, "data/source/.DS_Store", "x")
    tracked.require_rows(folder)


@pytest.mark.parametrize("path", ["data/source/mine/a/train.jsonl", "data/source/mine"])
def test_rows_that_nobody_keeps_get_the_dvc_add_line(folder, path):
    write(folder, path, "{}")
    error = refused(tracked.require_rows, folder)
    assert error.found == "data/source/mine"
    assert error.fix == (
        "dvc add data/source/mine && git add data/source/mine.dvc data/source/.gitignore"
    )


def test_rows_that_git_ignores_are_refused_too(folder):
    write(folder, "data/source/mine/train.jsonl", "{}")
    write(folder, ".gitignore", "mine\n")
    assert "dvc add data/source/mine" in refused(tracked.require_rows, folder).fix


def test_rows_of_dvc_that_git_was_not_told_of_get_the_git_line(folder):
    write(folder, "data/source/mine/train.jsonl", "{}")
    write(folder, "data/source/mine.dvc", "outs: []\n")
    error = refused(tracked.require_rows, folder)
    assert error.fix == "git add data/source/mine.dvc data/source/.gitignore"


def test_rows_of_dvc_pass(folder):
    write(folder, "data/source/mine/train.jsonl", "{}")
    write(folder, "data/source/mine.dvc", "outs: []\n")
    subprocess.run(["git", "add", "data/source/mine.dvc"], cwd=folder, check=True)
    tracked.require_rows(folder)


def test_untracked_code_and_settings_are_refused(folder):
    write(folder, "stages/train/new.py", "x = 2\n")
    write(folder, "conf/train/mine.yaml", "seed: 1\n")
    error = refused(tracked.require_project, folder)
    assert error.fix == "git add conf/train/mine.yaml stages/train/new.py"
    write(folder, ".gitignore", "new.py\nconf/train/mine.yaml\n")
    tracked.require_project(folder)


def test_what_stages_write_is_no_dependency(folder):
    assert tracked.dependencies(folder) == [
        "data/source",
        "stages/collect",
        "stages/report",
        "stages/train",
    ]


def test_hashes_follow_the_working_tree_and_agree_with_a_commit(folder):
    paths = ["data/source", "stages"]
    before = git.hashes(folder, paths)
    assert before == git.hashes_at(folder, "HEAD", paths)
    # sha1 of "blob 2\0{}"
    assert before["data/source/toy/train.jsonl"] == "9e26dfeeb6e641a33dae4961196235bdb965b21b"
    write(folder, "stages/train/loop.py", "x = 2\n")
    assert git.hashes(folder, paths) != before
    (folder / "stages/train/loop.py").unlink()
    assert set(before) - set(git.hashes(folder, paths)) == {"stages/train/loop.py"}


def test_a_repository_without_a_commit_says_so(tmp_path):
    assert "no git repository" in refused(git.require_commit, tmp_path).what
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert "no commit yet" in refused(git.require_commit, tmp_path).what
