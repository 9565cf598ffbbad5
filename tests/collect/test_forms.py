"""Rows of every form into the one schema; the records are written down by hand."""

import pytest

from stages.collect import forms
from stages.collect.badrow import BadRow

AUTO = forms.Rules()


def normalized(row, rules=AUTO):
    made, _ = forms.record(row, rules)
    return made.kind, made.record


def reason(row, rules=AUTO):
    with pytest.raises(BadRow) as caught:
        forms.record(row, rules)
    return caught.value.reason


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("row", "kind", "record"),
    [
        ({"text": " a\u00a0b \r\n"}, "text", {"text": " a\u00a0b \r\n"}),
        ({"prompt": "q", "completion": "a"}, "completion", {"prompt": "q", "completion": "a"}),
        ({"question": "q", "answer": "a"}, "completion", {"prompt": "q", "completion": "a"}),
        ({"input": "q", "output": "a"}, "completion", {"prompt": "q", "completion": "a"}),
        (
            {"prompt": "q", "response": "a", "system": "s"},
            "completion",
            {"prompt": "q", "completion": "a", "system": "s"},
        ),
        (
            {"instruction": "do", "input": "x", "output": "y"},
            "completion",
            {"prompt": "do\nx", "completion": "y"},
        ),
        (
            {"instruction": "do", "input": "", "output": "y"},
            "completion",
            {"prompt": "do", "completion": "y"},
        ),
        (
            {"instruction": "do", "input": None, "output": "y"},
            "completion",
            {"prompt": "do", "completion": "y"},
        ),
        (
            {"instruction": "do", "context": "x", "response": "y", "category": "z"},
            "completion",
            {"prompt": "do\nx", "completion": "y"},
        ),
        (
            {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]},
            "chat",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "d"},
                ]
            },
        ),
        ({"messages": TURNS}, "chat", {"messages": TURNS}),
        ({"messages": TURNS, "tools": "[]"}, "chat", {"messages": TURNS}),
        ({"messages": TURNS, "tools": [TOOL]}, "chat", {"messages": TURNS, "tools": [TOOL]}),
        (
            {"conversations": TURNS, "system": "s"},
            "chat",
            {"messages": [{"role": "system", "content": "s"}, *TURNS]},
        ),
        (
            {"prompt": "q", "completion": "a", "tools": [TOOL]},
            "chat",
            {"messages": TURNS, "tools": [TOOL]},
        ),
    ],
)
def test_each_form_has_one_record(row, kind, record):
    assert normalized(row) == (kind, record)


def test_text_gives_way_to_a_form_that_knows_where_the_answer_begins():
    """The stated rule for a row that fits two forms."""
    row = {"text": "qa", "prompt": "q", "completion": "a"}
    made, how = forms.record(row, AUTO)
    assert made.record == {"prompt": "q", "completion": "a"}
    assert how.outvoted == ("text",)
    assert normalized(row, forms.Rules("text")) == ("text", {"text": "qa"})


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({}, "keys (none) fit no form"),
        ({"prompt": "only"}, "keys prompt fit no form"),
        ({"completion": "only"}, "keys completion fit no form"),
        ({"nottext": "x"}, "keys nottext fit no form"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference pairs"),
        ({"text": ""}, "text is empty"),
        ({"text": " \t\u00a0\n"}, "text holds only white space"),
        ({"text": 7}, "text is a number, text was expected"),
        ({"text": None}, "text is null"),
        ({"text": ["a"]}, "text is a list"),
        ({"prompt": "", "completion": "a"}, "prompt is empty"),
        ({"prompt": "q", "completion": "  "}, "completion holds only white space"),
        ({"prompt": "q", "completion": None}, "completion is null"),
        ({"instruction": "", "input": " ", "output": "a"}, "instruction is empty"),
        ({"prompt": "q", "completion": "a", "answer": "b"}, "'completion', 'answer' could each be"),
        ({"messages": TURNS, "prompt": "q", "completion": "a"}, "fit two forms"),
        ({"messages": TURNS, "conversations": TURNS}, "ambiguous"),
        ({"messages": TURNS, "images": ["x.jpg"]}, "images: only text can be trained"),
        ({"messages": TURNS, "tools": "[{]"}, "tools holds a string that is not JSON"),
        ({"messages": TURNS, "tools": "{}"}, "tools is an object, a list of tools was expected"),
        ({"messages": TURNS, "tools": [{"type": "function"}]}, "tools[0]: the tool has no name"),
        ({"messages": [{"role": "system", "content": "a"}, *TURNS], "system": "b"}, "system turn"),
    ],
)
def test_what_cannot_be_used_has_a_reason(row, found):
    assert found in reason(row)


def test_keys_no_form_needs_are_ignored_but_known():
    _, how = forms.record({"id": 3, "text": "x", "meta": {"a": 1}, "empty": None}, AUTO)
    assert how.unused == ("id", "meta")


def test_named_columns_decide():
    rules = forms.Rules(columns=(("prompt", "q"), ("completion", "response_b")))
    row = {"q": "1", "response": "a", "response_b": "b", "text": "t"}
    assert normalized(row, rules) == ("completion", {"prompt": "1", "completion": "b"})
    assert "no column 'response_b'" in reason({"q": "1", "response": "a"}, rules)
    rules = forms.Rules(columns=(("prompt", "question"), ("input", "context")))
    row = {"question": "q", "context": "c", "answer": "a"}
    assert normalized(row, rules) == ("completion", {"prompt": "q\nc", "completion": "a"})
    rules = forms.Rules(columns=(("text", "body"),))
    assert normalized({"body": "b", "text": "t"}, rules) == ("text", {"text": "b"})
    rules = forms.Rules(columns=(("messages", "turns"), ("tools", "functions")))
    row = {"turns": TURNS, "functions": [TOOL], "prompt": "x", "completion": "y"}
    assert normalized(row, rules) == ("chat", {"messages": TURNS, "tools": [TOOL]})


@pytest.mark.parametrize(
    ("format", "fits"),
    [("text", 0), ("completion", 1), ("alpaca", 2), ("chat", 3), ("sharegpt", 4)],
)
def test_a_fixed_form_refuses_rows_of_every_other_form(format, fits):
    rows = [
        {"text": "t"},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"messages": TURNS},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    rules = forms.Rules(format)
    forms.record(rows[fits], rules)
    for i, row in enumerate(rows):
        if i != fits:
            assert f"not of the form {format}" in reason(row, rules)
