"""params.yaml of a workspace: A3 and A6 of the cases that users met, without DVC around it."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from stages.compose import record, workspace
from stages.core.errors import UserError
from tests.compose.conftest import ROOT


def write(project, *overrides, **options):
    """Compose as DVC's stage does (`by_hand=True`: as a person does)."""
    workspace.write(project, overrides, **{"by_hand": False, **options})


def params(project):
    return yaml.safe_load((project / "params.yaml").read_text())


def edit(project, file, old, new):
    path = project / "conf" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def apply_experiment(project, *overrides):
    """What `dvc exp run -S …` leaves behind: DVC's params.yaml, seen by compose."""
    from dvc.utils.hydra import compose_and_dump

    file = project / "params.yaml"
    compose_and_dump(file, str(project / "conf"), None, "config", str(project), list(overrides))
    workspace.check(project)


def test_an_edit_of_conf_reaches_params_yaml_and_is_printed(project, capsys):
    write(project)
    edit(project, "train/lora.yaml", "learning_rate: 1e-4", "learning_rate: 2e-4")
    capsys.readouterr()
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0002
    assert capsys.readouterr().err.strip() == "train.learning_rate: 0.0001 → 0.0002"


def test_nothing_changed_leaves_the_file_alone(project, capsys):
    write(project)
    before = (project / "params.yaml").stat().st_mtime_ns
    capsys.readouterr()
    write(project)
    assert (project / "params.yaml").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_under_an_experiment_the_file_stays_byte_for_byte(project):
    apply_experiment(project, "train.learning_rate=3e-4")
    before = (project / "params.yaml").read_bytes()
    workspace.check(project)
    assert (project / "params.yaml").read_bytes() == before


def test_under_an_experiment_wrong_values_are_refused(project):
    with pytest.raises(UserError, match=r"train\.learning_rate is out of range"):
        apply_experiment(project, "train.learning_rate=-1")


def test_after_a_refused_experiment_conf_counts_again(project):
    write(project)
    with pytest.raises(UserError):
        apply_experiment(project, "train.learning_rate=-1")
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0001


def test_a3_an_edit_of_memory_keeps_the_applied_mathematics(project):
    apply_experiment(project, "train.learning_rate=3e-4", "run.keep_last=5")
    edit(project, "memory/auto.yaml", "batch_size: auto", "batch_size: 2")
    write(project)
    found = params(project)
    assert found["train"]["learning_rate"] == 0.0003
    assert found["memory"]["batch_size"] == 2
    assert found["run"]["keep_last"] == 5


def test_a3_twice_in_a_row(project):
    apply_experiment(project, "train.learning_rate=3e-4")
    for old, new in (("auto", "2"), ("2", "4")):
        edit(project, "memory/auto.yaml", f"batch_size: {old}", f"batch_size: {new}")
        write(project)
    assert params(project)["train"]["learning_rate"] == 0.0003
    assert params(project)["memory"]["batch_size"] == 4


def test_a3_carried_values_have_the_bytes_that_dvc_would_write(project):
    from dvc.utils.hydra import compose_and_dump

    apply_experiment(project, "train.learning_rate=3e-4", "train.updates=9")
    edit(project, "memory/auto.yaml", "batch_size: auto", "batch_size: 2")
    write(project)
    file, overrides = project / "dvc.yaml", ["train.learning_rate=3e-4", "train.updates=9"]
    compose_and_dump(file, str(project / "conf"), None, "config", str(project), overrides)
    assert (project / "params.yaml").read_bytes() == file.read_bytes()


def test_a6_an_edit_of_mathematics_stops_and_lists_the_applied_values(project):
    apply_experiment(project, "train.learning_rate=3e-4", "train.lora_parameters.rank=4")
    before = (project / "params.yaml").read_bytes()
    edit(project, "train/lora.yaml", "num_layers: 8", "num_layers: 4")
    with pytest.raises(UserError) as caught:
        write(project)
    assert "train.learning_rate=0.0003 (conf/ says 0.0001)" in caught.value.found
    assert "train.lora_parameters.rank=4 (conf/ says 8)" in caught.value.found
    assert "num_layers" not in caught.value.found
    assert "--keep NAME" in caught.value.fix
    assert "--drop" in caught.value.fix
    assert (project / "params.yaml").read_bytes() == before


def test_a6_drop_takes_the_values_of_conf(project):
    apply_experiment(project, "train.learning_rate=3e-4")
    edit(project, "train/lora.yaml", "num_layers: 8", "num_layers: 4")
    write(project, drop=True)
    assert params(project)["train"]["learning_rate"] == 0.0001
    assert params(project)["train"]["num_layers"] == 4
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0001


def test_a6_keep_makes_them_part_of_conf(project):
    apply_experiment(project, "train.learning_rate=3e-4")
    edit(project, "train/lora.yaml", "num_layers: 8", "num_layers: 4")
    write(project, keep="best")
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0003
    assert params(project)["train"]["num_layers"] == 4
    assert (project / "conf/experiment/best.yaml").exists()
    edit(project, "train/lora.yaml", "seed: 0", "seed: 1")
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0003


def test_a6_without_a_record_conf_of_the_last_commit_decides(project):
    """A colleague's experiment was pulled and applied: compose never saw it."""
    write(project)
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(
        text.replace("learning_rate: 0.0001", "learning_rate: 0.0003")
    )
    edit(project, "memory/auto.yaml", "batch_size: auto", "batch_size: 2")
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0003
    edit(project, "train/lora.yaml", "num_layers: 8", "num_layers: 4")
    with pytest.raises(UserError, match="applied experiment"):
        write(project)


def test_an_uncommitted_edit_before_the_experiment_is_no_value_of_it(project):
    edit(project, "train/lora.yaml", "num_layers: 8", "num_layers: 4")
    apply_experiment(project, "train.learning_rate=3e-4")
    edit(project, "train/lora.yaml", "num_layers: 4", "num_layers: 6")
    with pytest.raises(UserError) as caught:
        write(project)
    assert caught.value.found == "train.learning_rate=0.0003 (conf/ says 0.0001)"


def test_values_given_by_hand_stay_for_dvc_and_give_way_to_a_person(project):
    write(project, "train.updates=3", by_hand=True)
    write(project)
    assert params(project)["train"]["updates"] == 3
    write(project, "train.seed=5", by_hand=True)
    assert params(project)["train"]["updates"] == 20
    write(project, by_hand=True)
    assert params(project)["train"]["seed"] == 0


def test_a_person_cannot_lose_an_applied_value_by_naming_another(project):
    apply_experiment(project, "train.learning_rate=3e-4")
    write(project, "train.seed=5", by_hand=True)
    assert params(project)["train"]["learning_rate"] == 0.0003
    assert params(project)["train"]["seed"] == 5


@pytest.mark.parametrize(
    "text", ["", "train: [", "<<<<<<< ours\ntrain:\n", "- a\n", "nonsense: 1\n"]
)
def test_a_params_yaml_that_no_run_could_use_is_composed_anew(project, text, capsys):
    (project / "params.yaml").write_text(text)
    write(project)
    assert params(project)["train"]["learning_rate"] == 0.0001
    assert "composed anew" in capsys.readouterr().err


def test_a_person_can_say_the_value_of_conf_again(project):
    apply_experiment(project, "train.learning_rate=3e-4", "train.seed=5")
    write(project, "train.learning_rate=1e-4", by_hand=True)
    assert params(project)["train"]["learning_rate"] == 0.0001
    assert params(project)["train"]["seed"] == 5


def test_values_given_by_hand_can_be_kept(project):
    write(project, "train.updates=3", by_hand=True)
    write(project, keep="short", by_hand=True)
    write(project, by_hand=True)
    assert params(project)["train"]["updates"] == 3


def test_nothing_to_keep_is_said(project):
    write(project)
    with pytest.raises(UserError, match="nothing to keep"):
        write(project, keep="best")


def test_records_do_not_grow_without_end(project, monkeypatch):
    monkeypatch.setattr(record, "MOST", 3)
    for seed in range(6):
        write(project, f"train.seed={seed}", by_hand=True)
    assert len(list((project / ".cache/compose").glob("*.json"))) == 3


def test_a_torn_record_counts_as_none(project):
    apply_experiment(project, "train.learning_rate=3e-4")
    for file in (project / ".cache/compose").glob("*.json"):
        file.write_text('{"conf": {')
    edit(project, "train/lora.yaml", "num_layers: 8", "num_layers: 4")
    with pytest.raises(UserError, match="applied experiment"):
        write(project)


def test_what_a_killed_compose_left_is_removed_by_the_next(project):
    """Killed for certain between writing the temporary file and its new name."""
    code = (
        "import os, signal; from pathlib import Path; from stages.compose import workspace\n"
        "from stages.core import files\n"
        "files.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "workspace.write(Path.cwd())"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(project.glob(".tmp-params.yaml-*"))) == 1
    (project / ".tmp-other").touch()
    write(project)
    assert [file.name for file in project.glob(".tmp-*")] == [".tmp-other"]
    (project / ".tmp-params.yaml-0").touch()
    write(project)  # nothing to write
    assert not (project / ".tmp-params.yaml-0").exists()


def test_what_a_living_compose_writes_is_left_to_it(project):
    """The other one holds the folder; this one waits until it is done."""
    write(project)
    code = (
        "import time; from pathlib import Path; from stages.compose import workspace\n"
        "with workspace._writing(Path.cwd()):\n"
        "    Path('.tmp-params.yaml-1').write_text('x'); print('writes', flush=True)\n"
        "    time.sleep(1); Path('.tmp-params.yaml-1').rename('done')"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "writes\n"
    write(project)
    assert (project / "done").read_text() == "x"
    assert other.wait(60) == 0
