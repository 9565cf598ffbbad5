"""`python -m stages chat`: answers are mlx-lm's own, with adapters and without, turn after turn."""

import argparse
import io
import json
import shutil

import mlx.core as mx
import pytest
from mlx_lm import generate, load

from stages.commands import chat
from stages.core import files
from stages.core.config import schema
from stages.core.model import models
from stages.core.update import adapters

TINY = schema.Model(repo="builtin:tiny", dtype="float32")
TRAIN = schema.Train(num_layers=2, updates=5)


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """A folder as after training: params.yaml, data/model.json, adapters/."""
    monkeypatch.chdir(tmp_path)
    params = {"model": {"repo": "builtin:tiny", "dtype": "float32"}, "train": {"updates": 5}}
    (tmp_path / "params.yaml").write_text(json.dumps(params))
    manifest = models.build_manifest(TINY)
    files.write_json(tmp_path / "data" / "model.json", manifest.record())
    model, _ = models.load_model(models.folder(manifest, TINY))
    adapters.attach(model, TRAIN)
    moved = [
        (name, mx.random.normal(array.shape, key=mx.random.key(i)))
        for i, (name, array) in enumerate(sorted(adapters.trained(model).items()))
    ]
    adapters.save(tmp_path / "adapters", dict(moved), manifest, TRAIN)
    return models.folder(manifest, TINY)


def by_mlx_lm(folder, turns, adapter_path, tokens=8):
    model, tokenizer = load(str(folder), adapter_path=adapter_path)
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    return generate(model, tokenizer, prompt, max_tokens=tokens)


def test_one_answer_is_that_of_mlx_lm(workspace, capsys):
    turns = [{"role": "user", "content": "hello"}]
    assert chat.main(["--prompt", "hello", "--max-tokens", "8"]) == 0
    with_adapters = capsys.readouterr().out
    assert with_adapters == by_mlx_lm(workspace, turns, "adapters") + "\n"
    assert chat.main(["--prompt", "hello", "--max-tokens", "8", "--base"]) == 0
    alone = capsys.readouterr().out
    assert alone == by_mlx_lm(workspace, turns, None) + "\n"
    assert alone != with_adapters


def test_later_turns_know_the_earlier_ones(workspace, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\nr\none\nq\nnever read\n"))
    assert chat.main(["--system", "S", "--max-tokens", "6"]) == 0
    system = {"role": "system", "content": "S"}
    turns = [system, {"role": "user", "content": "one"}]
    first = by_mlx_lm(workspace, turns, "adapters", tokens=6)
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = by_mlx_lm(workspace, turns, "adapters", tokens=6)
    out = capsys.readouterr().out
    assert out == f"> {first}\n> > {second}\n> > {first}\n> "


def test_the_cache_holds_what_was_read(workspace, monkeypatch):
    """Only the new part of the conversation is read at the second turn."""
    model, _ = models.load_model(workspace)
    _, tokenizer = load(str(workspace))
    options = argparse.Namespace(system=None, max_tokens=5, temp=0.0)
    talk = chat.Conversation(model, tokenizer, options)
    list(talk.answer("one"))
    whole = talk._tokens("two")
    fresh = talk._after_cached(whole)
    assert 0 < len(fresh) < len(whole)
    assert whole[-len(fresh) :] == fresh
    assert talk.cache[0].offset == len(whole) - len(fresh)


def test_without_an_adapter_folder_the_base_answers(workspace, capsys):
    shutil.rmtree("adapters")
    assert chat.main(["--prompt", "hello", "--max-tokens", "8"]) == 0
    turns = [{"role": "user", "content": "hello"}]
    assert capsys.readouterr().out == by_mlx_lm(workspace, turns, None) + "\n"


def test_an_adapter_folder_asked_for_must_be_there(workspace, capsys):
    assert chat.main(["--prompt", "x", "--adapters", "nowhere"]) == 2
    assert "nowhere/adapter_config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("--max-tokens", "0"), ("--max-tokens", "2.5"), ("--temp", "-1"), ("--temp", "nan")],
    ids=" ".join,
)
def test_numbers_that_cannot_be_meant_are_refused(capsys, words):
    with pytest.raises(SystemExit) as ended:
        chat.main([*words, "--prompt", "hi"])
    assert ended.value.code == 2
    assert "number of at least" in capsys.readouterr().err
