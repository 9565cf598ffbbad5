"""Values of an applied experiment as a preset of conf/experiment/."""

import pytest

from stages.compose import composition, experiment
from stages.core.errors import UserError


def leaves(project, *overrides):
    return composition.leaves(composition.compose(project / "conf", overrides))


def test_the_preset_holds_the_values_and_is_selected(project):
    values = {"train.learning_rate": 3e-4, "train.lora_parameters.keys": ["self_attn.q_proj"]}
    experiment.keep(project / "conf", "best-one", values)
    found = leaves(project)
    assert found["train.learning_rate"] == 3e-4
    assert found["train.lora_parameters.keys"] == ["self_attn.q_proj"]
    assert found["train.seed"] == 0
    assert "- experiment: best-one\n" in (project / "conf/config.yaml").read_text()


def test_the_rest_of_config_yaml_stays_as_it_was(project):
    before = (project / "conf/config.yaml").read_text()
    experiment.keep(project / "conf", "best", {"train.seed": 7})
    after = (project / "conf/config.yaml").read_text()
    assert after == before.replace("experiment: null", "experiment: best")


def test_an_experiment_selected_before_stays_below(project):
    config = project / "conf/config.yaml"
    config.write_text(config.read_text().replace("experiment: null", "experiment: smoke"))
    experiment.keep(project / "conf", "best", {"train.updates": 4})
    found = leaves(project)
    assert found["model.repo"] == "builtin:tiny"
    assert found["train.updates"] == 4
    assert found["train.num_layers"] == 2


@pytest.mark.parametrize("name", ["smoke", "../out", "", "a b", ".hidden"])
def test_a_name_that_cannot_be_used_is_refused(project, name):
    with pytest.raises(UserError, match="cannot be kept under this name"):
        experiment.keep(project / "conf", name, {"train.seed": 7})


def test_values_that_a_file_cannot_say_are_refused_and_nothing_is_written(project):
    file = project / "conf/train/lora.yaml"
    file.write_text(
        file.read_text().replace("optimizer_config: {}", "optimizer_config: {adamw: {a: 1}}")
    )
    config = (project / "conf/config.yaml").read_text()
    with pytest.raises(UserError, match="cannot be kept as an experiment"):
        experiment.keep(project / "conf", "best", {"train.optimizer_config": {}})
    assert not (project / "conf/experiment/best.yaml").exists()
    assert (project / "conf/config.yaml").read_text() == config


def test_a_config_without_the_line_says_which(project):
    config = project / "conf/config.yaml"
    config.write_text(config.read_text().replace("  - experiment: null\n", ""))
    with pytest.raises(UserError, match="selects no experiment"):
        experiment.keep(project / "conf", "best", {"train.seed": 7})
