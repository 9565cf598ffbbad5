"""Turns of every dialect into one: the turns expected are written down by hand."""

from collections import Counter

import pytest

from stages.collect import chats
from stages.collect.badrow import BadRow

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def turns(*given, seen=None):
    return chats.turns(list(given), "messages", Counter() if seen is None else seen)


def reason(*given):
    with pytest.raises(BadRow) as caught:
        turns(*given)
    return caught.value.reason


def test_sharegpt_becomes_roles_and_calls():
    found = turns(
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": '{"y": 2}'},
        {"from": "gpt", "value": "a"},
    )
    assert found == [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"y": 2}'},
        ANSWER,
    ]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "f", "arguments": '{"x": 1}'},
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    ],
)
def test_a_call_has_its_arguments_as_an_object_however_it_was_written(call):
    for turn in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": [{"type": "tool_call", "value": call}]},
        {"from": "function_call", "value": call},
    ):
        assert turns(USER, turn)[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_calls_keep_their_ids_and_tool_turns_the_ids_they_answer():
    found = turns(
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
    )
    assert found[1]["tool_calls"] == [{"id": "c1", **CALL}]
    assert found[2] == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"}


def test_several_calls_in_one_turn_stay_several():
    both = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": ""}]'
    (_, turn) = turns(USER, {"from": "function_call", "value": both})
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["f", "g"]
    assert turn["tool_calls"][1]["function"]["arguments"] == {}


def test_text_parts_are_joined_and_thoughts_kept_apart():
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "text": "a"},
        {"type": "text", "value": "b"},
        "c",
    ]
    found = turns(USER, {"role": "assistant", "content": parts})
    assert found[1] == {"role": "assistant", "content": "abc", "reasoning_content": "hm"}


def test_whole_numbers_of_calls_stay_exact():
    """orjson alone would turn this into a float."""
    value = '{"name": "f", "arguments": {"n": 123456789012345678901234567890}}'
    (_, turn) = turns(USER, {"from": "function_call", "value": value})
    arguments = turn["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"n": 123456789012345678901234567890}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], "messages is empty"),
        ([USER], "no assistant turn"),
        ([USER, {"role": "bot", "content": "x"}], "messages[1]: unknown role 'bot'"),
        ([USER, {"from": "bot", "value": "x"}], "messages[1]: unknown role 'bot'"),
        ([USER, {"content": "x"}], "messages[1] has no role"),
        ([USER, {"role": 3, "content": "x"}], "messages[1].role is a number"),
        ([USER, {"role": "assistant"}], "messages[1] has no content"),
        ([USER, {"role": "assistant", "content": None}], "messages[1] has no content"),
        ([USER, {"role": "assistant", "content": ""}], "every assistant turn is empty"),
        ([USER, {"role": "assistant", "content": " \n"}], "every assistant turn is empty"),
        ([USER, {"role": "assistant", "content": {"a": 1}}], "messages[1].content is an object"),
        ([USER, "hello"], "messages[1] is a string"),
        ([USER, {"from": "gpt"}], "messages[1] has no value"),
        ([USER, {"from": "function_call", "value": "f(1)"}], "messages[1] holds a string"),
        ([USER, {"from": "function_call", "value": "[]"}], "without a call"),
        ([USER, {"from": "function_call", "value": '{"arguments": {}}'}], "the call has no name"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}],
            "the call's arguments are a list",
        ),
        ([{"role": "user", "content": "q", "tool_calls": [CALL]}, ANSWER], "cannot call tools"),
        (
            [{"role": "user", "content": [{"type": "image_url", "value": "x"}]}, ANSWER],
            "messages[0].content[0] is a part of type image_url: only text",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}, ANSWER],
            "only text can be trained",
        ),
        ([{"role": "user", "content": [{"type": "poem"}]}, ANSWER], "unknown type 'poem'"),
        ([{"role": "user", "content": [3]}, ANSWER], "content[0] is a number"),
    ],
)
def test_what_cannot_be_used_names_the_turn(given, found):
    assert found in reason(*given)


def test_oddities_are_kept_and_counted():
    seen = Counter()
    empty = {"role": "assistant", "content": ""}
    turns(USER, empty, USER, ANSWER, seen=seen)
    assert seen["empty assistant turn"] == 1
    turns(ANSWER, USER, seen=seen)
    assert seen["last turn is not the assistant's"] == 1
    turns({"role": "system", "content": "s"}, ANSWER, seen=seen)
    assert seen["no user turn"] == 1
    turns(USER, {**ANSWER, "weight": 0}, seen=seen)
    assert seen["assistant turn of weight 0"] == 1
    assert seen["turn key weight"] == 1


def test_bare_tools_are_wrapped_and_none_is_none():
    bare = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    wrapped = {"type": "function", "function": bare}
    assert chats.tools([bare], "tools") == [wrapped]
    assert chats.tools([wrapped], "tools") == [wrapped]
    assert chats.tools('[{"name": "f"}]', "tools") == [
        {"type": "function", "function": {"name": "f"}}
    ]
    for nothing in (None, "", " ", "[]", []):
        assert chats.tools(nothing, "tools") == []
