"""Real files through collect, tokenize and split: the figures that their notes state."""

import shutil
from pathlib import Path

import pytest

from stages.collect.collect import collect
from stages.core import tables
from stages.core.config.schema import Data, Shares, Split, Tokenize
from stages.split.work import split
from stages.tokenize.work import tokenize
from tests.tokenize import smollm2

FILES = Path(__file__).parents[3] / "shared" / "files"
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="no shared/files beside the repository")
LONG_TEXT = "10-c4-very-long-text/c4_demo.jsonl"
TOY_CHAT = "12-openai-toy-chat/toy_chat_fine_tuning.jsonl"


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)

    def made(name, **settings):
        path = FILES / name
        shutil.copy(path, tmp_path / path.name)
        (tmp_path / "raw").mkdir()
        collect(Data(path=path.name, shares=Shares(1.0, 0.0, 0.0)), tmp_path / "raw")
        out = tmp_path / "tokens"
        tokenize(tmp_path / "raw", out, smollm2.tokenizer(), [2], Tokenize(**settings))
        return out

    return made


def cut(tokens, cap, policy="split", overlap=0):
    settings = Split(policy=policy, max_seq_length=cap, overlap=overlap)
    report, _ = split(tokens, tokens.parent / "examples", settings)
    return report["splits"]["train"]


def test_very_long_texts(tokens):
    """29 pieces at 2,048 and 59 at 512; all 24,084 tokens, all 24,063 targets, 21 end tokens."""
    folder = tokens(LONG_TEXT)
    for cap, pieces in ((2048, 29), (512, 59)):
        found = cut(folder, cap)
        assert found["examples"] == pieces
        assert found["targets"] == 24063
        assert found["end_tokens"] == 21
        assert found["end_tokens_lost"] == 0
        # Each piece after a row's first repeats one token as context.
        assert found["tokens"] - (pieces - 21) == 24084


def test_the_end_token_is_in_the_last_piece_only(tokens):
    folder = tokens(LONG_TEXT)
    cut(folder, 512)
    rows = {}
    for batch in tables.batches(folder.parent / "examples" / "train.parquet"):
        for example in batch.to_pylist():
            rows.setdefault(example["row"], []).append(2 in example["tokens"])
    assert len(rows) == 21
    for ends in rows.values():
        assert ends == [False] * (len(ends) - 1) + [True]


def test_truncating_very_long_texts(tokens):
    """4 rows cut, 12,469 tokens kept, 11,615 lost."""
    found = cut(tokens(LONG_TEXT), 2048, "truncate_end")
    assert found["rows_truncated"] == 4
    assert found["tokens"] == 12469
    assert found["targets_lost"] == 11615
    assert found["end_tokens_lost"] == 4


def test_a_long_answer(tokens):
    """Line 5, cut to 2,048: its prompt has 31 tokens, so 2,017 targets remain."""
    found = cut(tokens(TOY_CHAT, train_on="last_assistant"), 2048, "truncate_end")
    assert found["targets"] == 12 + 8 + 12 + 6 + 2017


def test_a_chat_whose_last_answer_lies_behind_the_cap(tokens):
    """1,892 tokens, the last answer from 1,498 on: lost by truncation, kept by pieces."""
    folder = tokens("18-axolotl-missing-turns/conversation.json")
    assert cut(folder, 1024)["targets"] == 1732
    kept = cut(folder, 1024, "truncate_end")
    assert kept["targets"] + kept["targets_lost"] == 1732
    assert kept["end_tokens_lost"] == 1


def test_nothing_left_of_a_last_answer_behind_the_cap(tokens):
    folder = tokens("18-axolotl-missing-turns/conversation.json", train_on="last_assistant")
    found = cut(folder, 1024, "truncate_end")
    assert (found["examples"], found["rows_dropped"], found["targets_lost"]) == (0, 1, 394)
    assert cut(folder, 1024)["targets"] == cut(folder, 1024, "keep_completion")["targets"] == 394
