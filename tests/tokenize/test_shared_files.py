"""Real files through collect and tokenize: the figures that their notes state.

The figures were counted by mlx-lm's own data sets and by hand with SmolLM2's tokenizer.
"""

import json
import shutil
from pathlib import Path

import pytest

from stages.collect.collect import collect
from stages.core.config.schema import Data, Shares, Tokenize
from stages.core.errors import UserError
from stages.tokenize.work import tokenize
from tests.tokenize import smollm2
from tests.tokenize.chats import read_tokens

FILES = Path(__file__).parents[3] / "shared" / "files"
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="no shared/files beside the repository")

COUNTED = sorted(
    (path.parent.name, name)
    for path in FILES.glob("*/expected.json")
    for name, entry in json.loads(path.read_text(encoding="utf-8")).items()
    if "smollm2" in entry
)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def source(folder, name):
    """The file itself, or the one of that name in a sub-folder."""
    direct = FILES / folder / name
    return direct if direct.is_file() else next((FILES / folder).glob(f"*/{name}"))


def tokenized(workspace, path, on_bad_row="drop", **settings):
    shutil.copy(path, workspace / path.name)
    (workspace / "raw").mkdir(exist_ok=True)
    data = Data(path=path.name, on_bad_row=on_bad_row, shares=Shares(1.0, 0.0, 0.0))
    collect(data, workspace / "raw")
    out = workspace / "tokens"
    return tokenize(workspace / "raw", out, smollm2.tokenizer(), [2], Tokenize(**settings))


@pytest.mark.parametrize(("folder", "name"), COUNTED)
def test_tokens_and_targets(workspace, folder, name):
    path = source(folder, name)
    expected = json.loads((FILES / folder / "expected.json").read_text(encoding="utf-8"))
    counted = expected[name]["smollm2"]
    found = tokenized(workspace, path)["splits"]["train"]
    assert found["rows_out"] == counted["rows"]
    assert found["tokens"] == counted["tokens"]
    assert found["targets"] == counted["targets_all_assistant_turns"]
    assert found["length"]["max"] == counted["longest"]
    last = tokenized(workspace, path, train_on="last_assistant")["splits"]["train"]
    assert last["targets"] == counted["targets_last_turn"]


def test_content_lists(workspace):
    """Folder 09: one text part is the same as a string."""
    found = tokenized(workspace, source("09-content-part-lists", "v1_sft_demo.jsonl"))
    counts = found["splits"]["train"]
    assert (counts["rows_out"], counts["tokens"], counts["targets"]) == (122, 20584, 15215)
    assert counts["length"]["max"] == 587


def test_tools_without_a_place_in_the_template_are_refused(workspace):
    """Folder 08: 46 of 73 rows carry tools; all are named, none loses its calls in silence."""
    path = source("08-glaive-sharegpt-tools", "glaive_toolcall_en_demo.json")
    with pytest.raises(UserError) as caught:
        tokenized(workspace, path)
    assert caught.value.what == "46 rows cannot be tokenized"
    assert "no place for tools" in caught.value.found
    faults = json.loads((workspace / ".cache" / "tokenize_faults.json").read_text())
    carry = [
        line
        for line, row in enumerate(json.loads(path.read_text(encoding="utf-8")), 1)
        if row["tools"] != "[]"
    ]
    # A JSON array's rows are named by the line they begin at: in order, one name each.
    assert len({fault["line"] for fault in faults}) == len(carry) == 46
    assert not (workspace / "tokens").exists()


def test_text_with_a_masked_prompt_is_refused_in_words(workspace):
    with pytest.raises(UserError, match="a text row has none") as caught:
        tokenized(workspace, source("01-wikisql-full-text", "valid.jsonl"), train_on="completion")
    assert caught.value.where == "tokenize.train_on"


def test_the_default_system_message_is_said(workspace):
    """Folder 12: the template adds its own system message to line 3 only."""
    report = tokenized(workspace, source("12-openai-toy-chat", "toy_chat_fine_tuning.jsonl"))
    note = next(note for note in report["notes"] if "without a system turn" in note)
    assert "(1)" in note
    assert "SmolLM" in note


def test_targets_of_each_row(workspace):
    """Folder 12: 12, 8, 12, 6 and 8,002 targets in the last turns, 36 in all of line 2."""
    path = source("12-openai-toy-chat", "toy_chat_fine_tuning.jsonl")
    tokenized(workspace, path, train_on="last_assistant")
    last = [sum(row["target_mask"]) for row in read_tokens(workspace / "tokens")]
    assert last == [12, 8, 12, 6, 8002]
    tokenized(workspace, path)
    assert sum(read_tokens(workspace / "tokens")[1]["target_mask"]) == 36


def test_arabic_comes_back(workspace):
    """Folder 24: letters of several tokens, right to left; decoded byte for byte."""
    path = source("24-arabic-alpaca-json", "arabic_sft_samples.json")
    tokenized(workspace, path)
    rows = json.loads(path.read_text(encoding="utf-8"))
    for row, record in zip(read_tokens(workspace / "tokens"), rows, strict=True):
        targets = [
            token for token, flag in zip(row["tokens"], row["target_mask"], strict=True) if flag
        ]
        text = smollm2.tokenizer().backend_tokenizer.decode(targets, skip_special_tokens=False)
        assert text == record["output"] + "<|im_end|>\n"


def test_placeholders_stay_literal(workspace):
    """Folder 07: neither Jinja nor the settings render data."""
    path = source("07-alpaca-zh-json-array", "identity.json")
    tokenized(workspace, path)
    texts = [
        smollm2.tokenizer().backend_tokenizer.decode(row["tokens"])
        for row in read_tokens(workspace / "tokens")
    ]
    assert sum("{{name}}" in text for text in texts) == 77
