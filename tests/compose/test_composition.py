"""Composition: DVC's own bytes, and every wrong setting refused with its nearest neighbour."""

import itertools
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from stages.compose import composition
from stages.core.errors import UserError

OVERRIDES = [
    [],
    ["experiment=smoke"],
    ["train=full", "train.learning_rate=3e-6"],
    [
        "+train.optimizer_config={adamw: {weight_decay: 0.01}}",
        "train.updates=null",
        "train.epochs=2",
    ],
    ["+data.columns.prompt=question", "+data.columns.completion=answer"],
    ["train.lora_parameters.keys=[self_attn.q_proj,self_attn.v_proj]", "memory.loss_chunk=off"],
    ["memory.batch_size=2", "run.launch.hosts=[one,two]", "memory.budget_gb=6.5"],
]


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_the_bytes_are_those_that_dvc_writes(project, overrides):
    from dvc.utils.hydra import compose_and_dump

    file = project / "by-dvc.yaml"
    compose_and_dump(file, str(project / "conf"), None, "config", str(project), overrides)
    ours = composition.text(composition.compose(project / "conf", overrides))
    assert ours.encode() == file.read_bytes()


def _choices(project, group):
    return sorted(file.stem for file in (project / "conf" / group).glob("*.yaml"))


def test_every_choice_of_every_group_composes_or_says_what_it_needs(project):
    groups = ("data", "split", "train", "memory", "run", "experiment")
    for group, name in itertools.chain.from_iterable(
        ((group, name) for name in _choices(project, group)) for group in groups
    ):
        composed = composition.compose(project / "conf", [f"{group}={name}"])
        assert set(composed) == {
            "model", "data", "tokenize", "split", "train", "evaluate", "memory", "run",
        }  # fmt: skip


def test_the_presets_of_sweeps_name_keys_that_exist(project):
    from stages.core.config.settings import known_keys

    for file in (project / "conf" / "sweep").glob("*.yaml"):
        params = yaml.safe_load(file.read_text())["hydra"]["sweeper"]["params"]
        assert params and set(params) <= set(known_keys())


def test_values_of_a_file_in_conf_reach_the_composition(project):
    file = project / "conf/train/lora.yaml"
    file.write_text(file.read_text().replace("learning_rate: 1e-4", "learning_rate: 7e-5"))
    composed = composition.leaves(composition.compose(project / "conf"))
    assert composed["train.learning_rate"] == 0.00007
    assert composed["train.optimizer_config"] == {}
    assert "train.lora_parameters" not in composed


def refusal(project, *overrides):
    with pytest.raises(UserError) as caught:
        composition.compose(project / "conf", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learnig_rate=1", ["Unknown setting train.learnig_rate", "train.learning_rate"]),
        ("+train.learnig_rate=1", ["Unknown setting train.learnig_rate", "train.learning_rate"]),
        ("trian.seed=1", ["Unknown setting trian", "nearest known key: train"]),
        ("learning_rate=1", ["nearest known key: train.learning_rate"]),
        ("train.learning_rate=abc", ["wrong type", "train.learning_rate", "'abc'"]),
        ("train.updates=1.5", ["wrong type", "train.updates", "'1.5'"]),
        ("train.updates=0", ["train.updates=0", "at least 1"]),
        ("memory.grad_accumulation_steps=0", ["must be at least 1", "=0"]),
        ("train=lorra", ["train/lorra", "full lora"]),
        ("experiment=smok", ["experiment/smok", "smoke"]),
        ("train.optimizer_config.adamw=1", ["plus sign", "+train.optimizer_config"]),
        ("train.learning_rate", ["train.learning_rate"]),
        ("train.learning_rate=1,2", ["train.learning_rate=1,2"]),
    ],
)
def test_a_wrong_override_is_refused_in_words_that_help(project, override, words):
    message = refusal(project, override)
    for word in words:
        assert word in message, message
    assert "Config search path" not in message


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("train/lora.yaml", "seed: 0", "sead: 0", ["conf/train/lora.yaml", "train.seed"]),
        ("config.yaml", "samples: 3", "sampels: 3", ["conf/config.yaml", "evaluate.samples"]),
        ("train/lora.yaml", "seed: 0", "seed: yes", ["wrong type", "train.seed"]),
        ("train/lora.yaml", "seed: 0", "seed: [0", ["lora.yaml", "line 2"]),
        ("train/lora.yaml", "seed: 0", "seed: ${nowhere}", ["nowhere"]),
        ("train/lora.yaml", "seed: 0", "seed: 0\nseed: 1", ["duplicate key seed", "lora.yaml"]),
        ("config.yaml", "split: default", "split: defualt", ["split/defualt", "default"]),
        ("split/default.yaml", "overlap: 0", "overlap: 5000", ["split.overlap", "1022"]),
    ],
)
def test_a_wrong_line_in_conf_is_refused_by_file_or_key(project, file, old, new, words):
    path = project / "conf" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    message = refusal(project)
    for word in words:
        assert word in message, message


def test_a_folder_without_conf_is_named(tmp_path):
    with pytest.raises(UserError, match="no settings here"):
        composition.compose(tmp_path / "conf")


def test_the_command_ends_with_2_and_no_traceback(project):
    words = [sys.executable, "-m", "stages.compose", "train.learnig_rate=1"]
    done = subprocess.run(
        words, cwd=project, capture_output=True, text=True, env=_environment(), check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith("nearest known key: train.learning_rate")
    assert not (project / "params.yaml").exists()


def test_params_yaml_reads_back_as_it_was_composed(project):
    composed = composition.compose(project / "conf", ["train.learning_rate=1e-5"])
    read = OmegaConf.create(composition.text(composed))
    assert composition.leaves(read) == composition.leaves(composed)
    assert composition.leaves(read)["train.learning_rate"] == 1e-5


def _environment():
    import os

    from tests.compose.conftest import ROOT

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_file_that_is_not_utf8_is_named_with_its_line(project):
    file = project / "conf" / "train" / "lora.yaml"
    file.write_bytes(file.read_bytes() + b"# caf\xe9\n")
    with pytest.raises(UserError, match="not UTF-8") as caught:
        composition.compose(project / "conf")
    lines = len(file.read_bytes().splitlines())
    assert caught.value.where == f"conf/train/lora.yaml:{lines}"


def test_an_experiment_without_its_package_line_is_told_of_it(project):
    (project / "conf" / "experiment" / "mine.yaml").write_text("train:\n  seed: 3\n")
    with pytest.raises(UserError) as caught:
        composition.compose(project / "conf", ["experiment=mine"])
    assert "# @package _global_" in caught.value.fix


@pytest.mark.parametrize("word", ["=3", "experiment=null", "train.seed"])
def test_a_word_that_hydra_cannot_read_is_a_plain_error(project, word):
    with pytest.raises(UserError, match="cannot be composed"):
        composition.compose(project / "conf", [word])


def test_hydra_s_word_for_no_value_is_refused_by_file_and_key(project):
    for name, old in (("train/lora.yaml", "seed: 0"), ("config.yaml", "samples: 3")):
        file = project / "conf" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, old.split(":")[0] + ": ???"))
    with pytest.raises(UserError, match="no value") as caught:
        composition.compose(project / "conf")
    assert caught.value.where == "conf/train/lora.yaml, conf/config.yaml"
    assert caught.value.found == "train.seed=???, evaluate.samples=???"


def test_hydra_s_word_for_no_value_passes_where_it_says_nothing(project):
    """In a file that is not chosen, in a comment, and below a file that gives the value."""
    experiments = project / "conf" / "experiment"
    (experiments / "open.yaml").write_text("# @package _global_\ntrain:\n  seed: ???\n")
    composition.compose(project / "conf")
    (experiments / "given.yaml").write_text(
        "# @package _global_\n# ???\ndefaults: [open, _self_]\ntrain: {seed: 7}\n"
    )
    composed = composition.compose(project / "conf", ["experiment=given"])
    assert composed.train.seed == 7
    with pytest.raises(UserError, match="no value") as caught:
        composition.compose(project / "conf", ["experiment=open"])
    assert caught.value.where == "conf/experiment/open.yaml"
    assert caught.value.found == "train.seed=???"
