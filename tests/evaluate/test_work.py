import json

import mlx.core as mx
import numpy as np
import pyarrow.parquet as pq
import pytest
from mlx_lm import load

from stages.core import tables
from stages.core.errors import UserError
from stages.core.machine import device
from stages.core.model.tokenizers import load_tokenizer
from stages.evaluate import work
from tests.evaluate import workspace
from tests.evaluate.both import from_logits


@pytest.fixture(scope="module")
def machine():
    return device.prepare("cpu")


def evaluated(folder, machine, monkeypatch, **kwargs):
    monkeypatch.chdir(folder)
    work.evaluate(workspace.settings(**kwargs), machine)
    read = {
        name: json.loads((folder / f"reports/evaluate/{name}.json").read_text())
        for name in ("metrics", "samples")
    }
    return read["metrics"], read["samples"], pq.read_table("reports/evaluate/rows.parquet")


def test_everything_against_mlx_lms_own_loader(tmp_path, machine, monkeypatch, capfd):
    model_folder = workspace.make(tmp_path)
    numbers, shown, rows = evaluated(tmp_path, machine, monkeypatch)
    examples = tables.read_examples(tmp_path / "data/examples/test.parquet")
    folders = {"base": None, "tuned": str(tmp_path / "adapters")}
    for name, adapter in folders.items():
        model, tokenizer = load(str(model_folder), adapter_path=adapter)
        sums = np.zeros(4)
        hits = np.zeros(4)
        for i in range(len(examples)):
            loss, hit = _alone(model, *examples.example(i))
            sums[examples.row[i]] += loss.sum()
            hits[examples.row[i]] += hit.sum()
        targets = np.bincount(examples.row, examples.targets)
        assert numbers["targets"] == targets.sum()
        assert numbers[name]["loss"] == pytest.approx(sums.sum() / targets.sum(), rel=2e-5)
        accuracy = hits.sum() / targets.sum()
        assert numbers[name]["token_accuracy"] == pytest.approx(accuracy)
        found = np.array(rows[f"{name}_loss"])
        np.testing.assert_allclose(found, sums / targets, rtol=2e-5)
        for sample in shown["samples"]:
            assert sample[name]["text"] == _continued(model, tokenizer, sample)
    assert rows["pieces"].to_pylist() == [1, 1, 1, 2]
    assert numbers["rows"] == 4
    assert len(shown["samples"]) == 3
    assert {entry["row"] for entry in shown["best"] + shown["worst"]} == {0, 1, 2, 3}
    printed = capfd.readouterr().err
    for words in ("perplexity", "95% interval", "reports/report.html", "make chat", "in the data"):
        assert words in printed


def _alone(model, tokens, mask):
    """Losses and hits of one example, unpadded, from the model's own call."""
    mask = mask.copy()
    mask[0] = False
    batch = type("Batch", (), {"tokens_BT": tokens[None], "mask_BT": mask[None]})
    logits = model(mx.array(tokens[None])).astype(mx.float32)
    return from_logits(np.array(logits, np.float64), batch)


def _continued(model, tokenizer, sample):
    """Six times the likeliest next token, the whole sequence run anew each time, no cache."""
    turns = [{"role": "user", "content": sample["turns"][0]["content"]}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    found = []
    while len(found) < 6:
        token = mx.argmax(model(mx.array([prompt + found]))[0, -1]).item()
        if token in tokenizer.eos_token_ids:
            break
        found.append(token)
    return tokenizer.decode(found, skip_special_tokens=True)


def test_prompt_is_the_templates_own(tmp_path, machine, monkeypatch):
    model_folder = workspace.make(tmp_path)
    _, shown, _ = evaluated(tmp_path, machine, monkeypatch)
    tokenizer = load_tokenizer(model_folder)
    for sample in shown["samples"]:
        prompt, reference = workspace.CHATS[sample["row"]]
        turns = [{"role": "user", "content": prompt}]
        assert sample["turns"] == turns
        rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert sample["prompt"] == rendered
        assert sample["reference"] == reference


def test_a_generation_that_never_ends_is_cut(tmp_path, machine, monkeypatch):
    workspace.make(tmp_path)
    _, shown, _ = evaluated(tmp_path, machine, monkeypatch)
    answers = [sample[name] for sample in shown["samples"] for name in ("base", "tuned")]
    assert all(answer["tokens"] == 6 or answer["ended"] for answer in answers)
    assert any(answer["tokens"] == 6 and not answer["ended"] for answer in answers)


def test_same_run_same_files(tmp_path, machine, monkeypatch):
    workspace.make(tmp_path)
    evaluated(tmp_path, machine, monkeypatch)
    folder = tmp_path / "reports/evaluate"
    first = {file.name: file.read_bytes() for file in folder.iterdir()}
    evaluated(tmp_path, machine, monkeypatch)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == first


def test_leaked_rows_are_marked_and_not_asked(tmp_path, machine, monkeypatch):
    workspace.make(tmp_path, leaked=True)
    numbers, shown, rows = evaluated(tmp_path, machine, monkeypatch, samples=2)
    assert rows["also_in_train"].to_pylist() == [True, False, False, False]
    assert numbers["also_in_train"]["rows"] == 1
    assert numbers["not_in_train"]["rows"] == 3
    assert {sample["row"] for sample in shown["samples"]} == {1, 2}


def test_scores_are_those_of_the_generations(tmp_path, machine, monkeypatch):
    workspace.make(tmp_path)
    numbers, shown, _ = evaluated(tmp_path, machine, monkeypatch, samples=4)
    assert numbers["answers"]["rows"] == 4
    for name in ("base", "tuned"):
        exact = [s[name]["text"].strip() == s["reference"].strip() for s in shown["samples"]]
        assert numbers["answers"][name]["exact_match"] == sum(exact) / 4
        assert "json_valid" in numbers["answers"][name]  # one reference is JSON


def test_valid_split_and_no_samples(tmp_path, machine, monkeypatch):
    workspace.make(tmp_path, splits=("valid",))
    numbers, shown, _ = evaluated(tmp_path, machine, monkeypatch, split="valid", samples=0)
    assert numbers["split"] == "valid"
    assert shown["samples"] == []
    assert numbers["answers"] == {"rows": 0}


def test_an_empty_test_split_is_refused(tmp_path, machine, monkeypatch):
    workspace.make(tmp_path, splits=("valid",))
    with pytest.raises(UserError, match="nothing to evaluate on: the test split") as error:
        evaluated(tmp_path, machine, monkeypatch)
    assert error.value.where == "data/examples/test.parquet"
    assert not (tmp_path / "reports/evaluate").exists()
