"""doctor finds what was broken on purpose, and says how to mend it."""

import json
import subprocess
import sys

import pytest

from stages.commands import doctor


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_lock(folder, *lines):
    (folder / "requirements.lock").write_text(
        "".join(f"{line} \\\n    --hash=x\n" for line in lines)
    )


def test_packages_as_locked_are_fine(folder, monkeypatch):
    monkeypatch.setattr(doctor.sys, "prefix", str(folder))
    write_lock(folder, f"numpy=={doctor.importlib.metadata.version('numpy')}")
    (found,) = doctor.packages()
    assert (found.level, found.text) == ("ok", "all 1 as in requirements.lock")


def test_another_version_and_an_absent_package_are_named(folder, monkeypatch):
    monkeypatch.setattr(doctor.sys, "prefix", str(folder))
    write_lock(folder, "numpy==0.1", "no-such-package==3 ; sys_platform != 'plan9'")
    (found,) = doctor.packages()
    assert found.level == "wrong"
    assert "instead of 0.1" in found.text
    assert "no-such-package absent instead of 3" in found.text
    assert "make setup" in found.fix


def test_a_marker_of_another_system_asks_for_nothing(folder):
    write_lock(folder, "numpy==0.1 ; sys_platform == 'plan9'")
    assert doctor.locked_versions(folder / "requirements.lock") == {}


def test_the_lock_is_that_of_the_backend(folder, monkeypatch):
    monkeypatch.setattr(doctor.sys, "prefix", str(folder))
    assert doctor.lock_file().name == "requirements.lock"
    (folder / ".backend").write_text("cuda\n")
    assert doctor.lock_file().name == "requirements-cuda.lock"


def levels(check):
    return [(finding.level, finding.text) for finding in check()]


def test_no_repository_no_commit_no_name_are_told_apart(folder):
    assert levels(doctor.git) == [("wrong", "no repository here")]
    subprocess.run(["git", "init", "-q"], check=True)
    assert levels(doctor.git)[0][1].startswith("no commit yet")
    (folder / "file").write_text("x")
    subprocess.run(["git", "add", "."], check=True)
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *person, "commit", "-qm", "start"], check=True)
    found = levels(doctor.git)
    assert found[0][0] == "ok" and found[0][1].endswith("start; 0 files changed since")
    assert found[1][0] == "wrong" and "user.email" in found[1][1]


def test_git_that_is_not_installed_is_said(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    assert levels(doctor.git) == [("wrong", "not installed: DVC keeps a run's identity in it")]


def test_without_a_lock_it_says_so(folder):
    assert levels(doctor.packages) == [("wrong", "no requirements.lock here")]


def test_a_pipeline_that_dvc_cannot_read_is_told_with_its_reason(folder):
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    (folder / "dvc.yaml").write_text("stages: [1")
    ((level, text),) = levels(doctor.dvc)
    assert level == "wrong"
    assert text.startswith("`dvc status` fails: ")
    assert "dvc.yaml" in text


def test_a_line_is_printed_as_soon_as_it_is_known(monkeypatch, capfd):
    def findings():
        yield doctor.Finding("ok", "first", "seen")
        assert "first" in capfd.readouterr().err
        yield doctor.Finding("note", "second", "seen", "look")

    monkeypatch.setattr(doctor, "findings", findings)
    assert doctor.main([]) == 0
    assert "to do: look" in capfd.readouterr().err


def test_no_pipeline_is_said(folder):
    assert levels(doctor.dvc) == [("wrong", "no .dvc folder here")]


def test_a_wrong_value_in_local_yaml_is_a_finding_not_a_crash(folder):
    (folder / "params.yaml").write_text("model: {repo: 'builtin:tiny'}\ntrain: {updates: 1}\n")
    assert levels(doctor.values) == [("ok", "params.yaml fit")]
    (folder / "local.yaml").write_text("train: {seed: 3}\n")
    (found,) = doctor._safely(doctor.values)
    assert found.level == "wrong"
    assert "local.yaml may set memory.* and run.* only" in found.text


def test_little_space_is_noted(folder, monkeypatch):
    monkeypatch.setattr(doctor.files, "free_gb", lambda path: 1.5)
    (found,) = doctor.disk()
    assert found.level == "note"
    assert "1.5 GB free" in found.text
    assert "make clean-cache" in found.fix


def test_the_whole_report_as_json_ends_with_2_where_something_is_wrong(folder, capsys):
    write_lock(folder, "no-such-package==3")
    assert doctor.main(["--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert {"python", "packages", "device", "memory", "disk", ".cache", "git", "dvc"} <= {
        finding["name"] for finding in found
    }
    device = next(finding for finding in found if finding["name"] == "device")
    assert "GFLOP/s" in device["text"] and "mlx-lm" in device["text"]
