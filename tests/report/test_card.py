import json

import pytest
import yaml

from stages.core.config import schema
from stages.report import card, inputs
from tests.report import example


def written(folder, settings=example.SETTINGS, hostile=False):
    example.write(folder, hostile=hostile)
    return card.build(inputs.read(settings))


def front(text):
    _, matter, body = text.split("---\n", 2)
    return yaml.safe_load(matter), body


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_front_matter_is_what_the_hub_reads(tmp_path):
    matter, _ = front(written(tmp_path))
    assert matter["base_model"] == "SmolLM2-135M-Instruct"
    assert matter["library_name"] == "mlx"
    assert matter["pipeline_tag"] == "text-generation"
    assert matter["tags"] == ["mlx", "lora", "samestep"]
    assert matter["metrics"] == ["perplexity"]
    (result,) = matter["model-index"][0]["results"]
    assert result["dataset"] == {"name": "docstrings", "type": "docstrings", "split": "test"}
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values == {"loss": 1.8311, "perplexity": 6.2407}


def test_hub_model_and_data_are_named_by_their_ids(tmp_path):
    example.write(tmp_path)
    file = tmp_path / "data/model.json"
    source = {"kind": "hub", "repo": "org/base", "revision": "abc", "file": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), "source": source}))
    settings = schema.Settings(data=schema.Data(path="hub:org/rows"))
    matter, body = front(card.build(inputs.read(settings)))
    assert matter["base_model"] == "org/base"
    assert matter["datasets"] == ["org/rows"]
    assert "mlx_lm.generate --model org/base --adapter-path ." in body


def test_a_base_model_that_is_not_on_the_hub_is_used_from_the_project(tmp_path):
    _, body = front(written(tmp_path))
    assert 'mlx_lm.generate --model "$(python -m stages.model --path)"' in body


def test_rows_that_are_not_on_the_hub_are_no_dataset_id(tmp_path):
    assert "datasets" not in front(written(tmp_path))[0]


def test_body_has_the_numbers(tmp_path):
    _, body = front(written(tmp_path))
    for words in (
        "| base | 2.4137 | 11.18 |",
        "| tuned | 1.8311 | 6.241 |",
        "| change | −0.5826 (−0.6612 to −0.5034) | |",
        "80 test rows, 12,345 targets",
        "2 of these rows also stand in the training data",
        "| learning rate | 0.0002 |",
        "| effective batch | 16 examples |",
        "make repro",
    ):
        assert words in body


def test_words_of_the_data_cannot_leave_their_block(tmp_path):
    example.write(tmp_path)
    file = tmp_path / "reports/evaluate/samples.json"
    shown = json.loads(file.read_text())
    text = "before\n```\n# not a heading\n````\nafter"
    shown["samples"][0]["tuned"]["text"] = text
    file.write_text(json.dumps(shown))
    _, body = front(card.build(inputs.read(example.SETTINGS)))
    assert f"`````\n{text}\n`````" in body


def test_full_fine_tuning_has_no_rank(tmp_path):
    settings = schema.Settings(
        model=schema.Model(repo="builtin:tiny"),
        train=schema.Train(fine_tune_type="full", num_layers=-1),
    )
    matter, body = front(written(tmp_path, settings))
    assert matter["tags"] == ["mlx", "samestep"]
    assert "rank" not in body.split("## Samples", maxsplit=1)[0]
    assert "| layers | all |" in body


def test_an_interrupted_run_has_a_card_that_says_so():
    matter, body = front(card.build(inputs.read(example.SETTINGS)))
    assert "model-index" not in matter
    assert "not complete" in body
    assert "Not evaluated yet." in body
