"""The whole stage on small tables: what is refused, what is reported, what is written."""

import json

import pytest

from stages.core.config.schema import Tokenize
from stages.core.errors import UserError
from stages.tokenize.tally import length_summary
from stages.tokenize.work import spans, tokenize
from tests.tokenize import chats
from tests.tokenize.chats import call, read_tokens, turn, write_raw

PAIR = {"prompt": "Q1", "completion": "A1"}
CHAT = {"messages": [turn("system", "S"), turn("user", "Q1"), turn("assistant", "A1")]}


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, template, splits, **settings):
    write_raw(folder / "raw", **splits)
    made = chats.tokenizer(template)
    return tokenize(folder / "raw", folder / "tokens", made, [], Tokenize(**settings))


def test_tables_and_report(workspace):
    rows = [("text", {"text": "ab"}), ("completion", PAIR), ("chat", CHAT)]
    report = run(workspace, chats.CHATML, {"train": rows, "test": rows[:1]})
    train = report["splits"]["train"]
    # One token per byte, each special token one: text 2 + end; the turns as written out below.
    question = 1 + len("user\nQ1") + 2
    answer = 1 + len("assistant\n") + len("A1") + 2
    system = 1 + len("system\nS") + 2
    assert train["tokens"] == 3 + (question + answer) * 2 + system
    assert train["targets"] == 2 + 4 + 4
    assert train["rows_in"] == train["rows_out"] == 3
    assert {kind: form["rows"] for kind, form in train["forms"].items()} == {
        "text": 1,
        "completion": 1,
        "chat": 1,
    }
    assert all(form["ends_in_target"] == 1 for form in train["forms"].values())
    assert report["splits"]["valid"]["rows_out"] == 0
    assert report["samples"]["text"]["text"] == "a⟦b<|end|>⟧"
    assert report["samples"]["chat"]["line"] == 3
    written = read_tokens(workspace / "tokens")
    assert [row["row"] for row in written] == [0, 1, 2]
    assert [row["line"] for row in written] == [1, 2, 3]
    assert [row["system_end"] for row in written] == [0, 0, system]
    assert read_tokens(workspace / "tokens", "valid") == []


def test_questions_are_marked(workspace):
    chat = {"messages": [*CHAT["messages"], turn("user", "Q2"), turn("assistant", "A2")]}
    run(workspace, chats.CHATML, {"train": [("chat", chat)]})
    row = read_tokens(workspace / "tokens")[0]
    text = "<|start|>system\nS<|end|>\n<|start|>user\nQ1<|end|>\n<|start|>assistant\nA1<|end|>\n"
    specials = text.count("<|start|>") * (len("<|start|>") - 1)
    specials += text.count("<|end|>") * (len("<|end|>") - 1)
    assert row["starts"] == [len(text) - specials]
    assert row["end"] == len(row["tokens"]) - 2


def test_rows_without_a_target_are_named(workspace):
    asked = {"messages": [turn("user", "Q1")]}
    report = run(workspace, chats.CHATML, {"train": [("chat", CHAT), ("chat", asked)]})
    train = report["splits"]["train"]
    assert (train["rows_in"], train["rows_out"]) == (2, 1)
    assert train["rejected"][0]["line"] == 2
    assert "target" in train["rejected"][0]["reason"]
    assert [row["row"] for row in read_tokens(workspace / "tokens")] == [0]


def test_a_base_model_needs_a_template_for_chats(workspace):
    with pytest.raises(UserError) as caught:
        run(workspace, None, {"train": [("text", {"text": "a"}), ("completion", PAIR)]})
    assert caught.value.where == "tokenize.chat_template"
    assert "1 completion" in caught.value.found
    report = run(workspace, None, {"train": [("text", {"text": "ab"})]})
    assert report["splits"]["train"]["rows_out"] == 1


def test_all_refused_rows_of_all_splits_at_once(workspace):
    twice = {"messages": [turn("user", "a"), turn("user", "b"), turn("assistant", "c")]}
    good = ("completion", PAIR)
    splits = {
        "train": [good, ("chat", CHAT), ("chat", twice), ("chat", CHAT)],
        "valid": [("chat", twice)],
        "test": [good],
    }
    with pytest.raises(UserError) as caught:
        run(workspace, chats.STRICT, splits)
    message = str(caught.value)
    assert "4 rows cannot be tokenized" in message
    assert "no system role: train.jsonl lines 2, 4" in message
    assert "Roles must alternate: train.jsonl line 3" in message
    assert "Roles must alternate: valid.jsonl line 1" in message
    assert "tokenize.system_role=merge" in caught.value.fix
    assert not (workspace / "tokens").exists()
    faults = json.loads((workspace / ".cache" / "tokenize_faults.json").read_text())
    assert [(fault["source"], fault["line"]) for fault in faults] == [
        ("train.jsonl", 2),
        ("train.jsonl", 3),
        ("train.jsonl", 4),
        ("valid.jsonl", 1),
    ]


def test_merged_system_text_is_said(workspace):
    report = run(workspace, chats.STRICT, {"train": [("chat", CHAT)]}, system_role="merge")
    assert report["samples"]["chat"]["text"] == "<s>[Q]S\n\nQ1[/Q]⟦A1<|end|>⟧"
    assert report["notes"] == ["system text put into a user turn: 1 chats"]


def test_old_tables_stay_when_a_run_fails(workspace):
    run(workspace, chats.CHATML, {"train": [("completion", PAIR)]})
    before = read_tokens(workspace / "tokens")
    called = {"messages": [turn("user", "a"), turn("assistant", "", tool_calls=[call("f", {})])]}
    with pytest.raises(UserError, match="1 row cannot be tokenized"):
        run(workspace, chats.CHATML, {"train": [("chat", called)]})
    assert read_tokens(workspace / "tokens") == before
    assert sorted(path.name for path in (workspace / "tokens").iterdir()) == [
        "test.parquet",
        "train.parquet",
        "turns",
        "valid.parquet",
    ]


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([turn("user", "a"), turn("assistant", "b")], [{"name": "f"}], "no place for tools"),
        (
            [turn("user", "a"), turn("assistant", "", tool_calls=[call("f", {})])],
            None,
            "no place for tool calls",
        ),
        (
            [turn("user", "a"), turn("assistant", "b", reasoning_content="c")],
            None,
            "no place for reasoning",
        ),
    ],
)
def test_what_the_template_would_leave_out(workspace, messages, tools, reason):
    record = {"messages": messages, "tools": tools}
    with pytest.raises(UserError) as caught:
        run(workspace, chats.CHATML, {"train": [("chat", record)]})
    assert reason in caught.value.found


def test_a_lone_surrogate_is_refused(workspace):
    with pytest.raises(UserError) as caught:
        run(workspace, chats.CHATML, {"train": [("text", {"text": "ab\ud800"})]})
    assert "U+D800" in caught.value.found


def test_template_tags_in_texts_are_warned_of(workspace, capsys):
    rows = [("text", {"text": text}) for text in ("plain", "a<|start|>b", "<|end|>")]
    rows.append(("completion", {"prompt": "[/Q]", "completion": "x"}))
    report = run(workspace, chats.CHATML, {"train": rows})
    tags = report["splits"]["train"]["template_tags"]
    assert tags["rows"] == 3
    lines = {tag: [row["line"] for row in rows] for tag, rows in tags["examples"].items()}
    assert lines == {"<|start|>": [2], "<|end|>": [3], "[/Q]": [4]}
    assert "template tags" in capsys.readouterr().err


def test_plain_tags_of_a_template_without_special_tokens(workspace):
    plain = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}"
    rows = [("text", {"text": "x\n### user:\ny"}), ("text", {"text": "user"})]
    report = run(workspace, plain, {"train": rows})
    tags = report["splits"]["train"]["template_tags"]
    assert tags["rows"] == 1
    assert list(tags["examples"]) == ["### user:"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [([3], "line 3"), ([1, 2, 3, 7], "lines 1-3, 7"), ([9, 4], "lines 4, 9"), ([2, 2], "line 2")],
)
def test_spans(lines, expected):
    assert spans(lines) == expected


def test_length_summary():
    import numpy as np

    found = length_summary(np.arange(1, 102))
    expected = {"mean": 51.0, "p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0, "max": 101}
    assert found == expected
    assert set(length_summary(np.zeros(0)).values()) == {0}
