"""Chats into one shape: `{"role", "content", "tool_calls"?, "reasoning_content"?}` per turn.

Read are OpenAI's turns (role/content, tool_calls with arguments as string or object), ShareGPT's
(from/value with function_call and observation) and content as a list of parts. Text parts are
joined as they are, reasoning parts become `reasoning_content` (the name Qwen3's and DeepSeek's
templates use), tool_call parts become `tool_calls`. Images, audio and video are refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from stages.collect.badrow import BadRow
from stages.collect.jsontext import kind_of, read_value

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
MEDIA = ("image", "audio", "video", "file")
KEPT = ("name", "tool_call_id")
TURN_KEYS = {
    *("role", "content", "from", "value", "tool_calls", "function_call"),
    *("reasoning_content", *KEPT),
}

Turn = dict[str, Any]


def turns(value: Any, where: str, seen: Counter[str]) -> list[Turn]:
    """Normalize the turns of one chat.

    Args:
        value: A list of turns, or a string that holds one as JSON.
        where: The column, for messages.
        seen: Counts what is worth a note (see `stages.collect.notes`).

    Raises:
        BadRow: A turn has no known role, its content is no text, or nothing could be learnt.
    """
    if isinstance(value, str):
        value = read_value(value, where)
    if not isinstance(value, list):
        raise BadRow(f"{where} is {kind_of(value)}, a list of turns was expected")
    if not value:
        raise BadRow(f"{where} is empty")
    found = [_turn(turn, f"{where}[{i}]", seen) for i, turn in enumerate(value)]
    _learnable(found, where, seen)
    return found


def _learnable(found: list[Turn], where: str, seen: Counter[str]) -> None:
    """Refuse a chat without an answer; count the oddities of one with."""
    roles = {turn["role"] for turn in found}
    if "assistant" not in roles:
        raise BadRow(f"{where} has no assistant turn: there is nothing to learn")
    answers = [turn for turn in found if turn["role"] == "assistant"]
    empty = sum(1 for turn in answers if not _says_something(turn))
    if empty == len(answers):
        raise BadRow("the assistant says nothing: every assistant turn is empty")
    seen["empty assistant turn"] += bool(empty)
    seen["no user turn"] += "user" not in roles
    seen["last turn is not the assistant's"] += found[-1]["role"] != "assistant"


def _says_something(turn: Turn) -> bool:
    return bool(turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content"))


def _turn(value: Any, where: str, seen: Counter[str]) -> Turn:
    if not isinstance(value, dict):
        raise BadRow(f"{where} is {kind_of(value)}, an object with role and content was expected")
    if "from" in value and "role" not in value:
        return _sharegpt_turn(value, where, seen)
    role = ROLES.get(_role(value, "role", where))
    if role is None:
        raise _unknown_role(value["role"], ROLES, where)
    turn: Turn = {"role": role, "content": ""}
    calls = _calls_of(value, where)
    thoughts = value.get("reasoning_content") or ""
    content = value.get("content")
    if isinstance(content, list):
        content, more_thoughts, more_calls = _parts(content, where)
        thoughts, calls = (
            _text(thoughts, f"{where}.reasoning_content") + more_thoughts,
            [
                *calls,
                *more_calls,
            ],
        )
    if content is None and not calls and not thoughts:
        raise BadRow(f"{where} has no content")
    turn["content"] = _text("" if content is None else content, f"{where}.content")
    if thoughts:
        turn["reasoning_content"] = _text(thoughts, f"{where}.reasoning_content")
    return _finished(turn, calls, value, where, seen)


def _finished(turn: Turn, calls: list[Any], value: Turn, where: str, seen: Counter[str]) -> Turn:
    """Add calls and names to a turn, and count what is left out."""
    if calls:
        if turn["role"] != "assistant":
            raise BadRow(f"{where}: a {turn['role']} turn cannot call tools")
        turn["tool_calls"] = calls
        seen["turns that call tools"] += 1
    seen["thoughts"] += "reasoning_content" in turn
    for key in KEPT:
        if isinstance(value.get(key), str):
            turn[key] = value[key]
    for key in value.keys() - TURN_KEYS:
        if value[key] is None:
            continue
        seen[f"turn key {key}"] += 1
        if "weight" in key and value[key] == 0 and turn["role"] == "assistant":
            seen["assistant turn of weight 0"] += 1
    return turn


def _role(value: Turn, key: str, where: str) -> str:
    role = value.get(key)
    if role is None:
        raise BadRow(f"{where} has no {key}")
    if not isinstance(role, str):
        raise BadRow(f"{where}.{key} is {kind_of(role)}, a string was expected")
    return role


def _unknown_role(role: str, known: dict[str, str], where: str) -> BadRow:
    return BadRow(f"{where}: unknown role {role[:40]!r} (known: {', '.join(known)})")


def _sharegpt_turn(value: Turn, where: str, seen: Counter[str]) -> Turn:
    role = SHAREGPT.get(_role(value, "from", where))
    if role is None:
        raise _unknown_role(value["from"], SHAREGPT, where)
    seen["ShareGPT turns"] += 1
    if "value" not in value or value["value"] is None:
        raise BadRow(f"{where} has no value")
    content = value["value"]
    if role != "function_call":
        turn = {"role": role, "content": _text(content, f"{where}.value")}
        return _finished(turn, [], value, where, seen)
    if isinstance(content, str):
        content = read_value(content, where)
    calls = [_call(call, where) for call in (content if isinstance(content, list) else [content])]
    if not calls:
        raise BadRow(f"{where}: a function_call turn without a call")
    return _finished({"role": "assistant", "content": ""}, calls, value, where, seen)


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise BadRow(f"{where} is {kind_of(value)}, text was expected")


def _parts(parts: list[Any], where: str) -> tuple[str, str, list[Turn]]:
    """Text, reasoning and calls of a content list."""
    text, thoughts, calls = [], [], []
    for i, part in enumerate(parts):
        here = f"{where}.content[{i}]"
        if isinstance(part, str):
            text.append(part)
            continue
        if not isinstance(part, dict):
            raise BadRow(f"{here} is {kind_of(part)}, a part with a type was expected")
        name = part.get("type")
        if name == "tool_call":
            value = part.get("value")
            calls.append(_call(read_value(value, here) if isinstance(value, str) else value, here))
        elif name in ("text", "reasoning"):
            value = part.get("text") if part.get("text") is not None else part.get("value")
            (text if name == "text" else thoughts).append(_text(value, here))
        else:
            raise _unreadable_part(name, here)
    return "".join(text), "".join(thoughts), calls


def _unreadable_part(name: Any, where: str) -> BadRow:
    if isinstance(name, str) and any(word in name for word in MEDIA):
        return BadRow(f"{where} is a part of type {name}: only text can be trained")
    return BadRow(
        f"{where} is a part of unknown type {name!r:.40} (known: text, reasoning, tool_call)"
    )


def _calls_of(value: Turn, where: str) -> list[Turn]:
    """The calls of an OpenAI turn, today's `tool_calls` or the older `function_call`."""
    if value.get("function_call") is not None:
        return [_call(value["function_call"], f"{where}.function_call")]
    calls = value.get("tool_calls")
    if isinstance(calls, str):
        calls = read_value(calls, f"{where}.tool_calls") if calls.strip() else None
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRow(f"{where}.tool_calls is {kind_of(calls)}, a list was expected")
    return [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _call(value: Any, where: str) -> Turn:
    """One call as `{"type": "function", "function": {"name", "arguments": object}}`."""
    if not isinstance(value, dict):
        raise BadRow(f"{where}: the call is {kind_of(value)}, an object was expected")
    inner = value.get("function", value)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise BadRow(f"{where}: the call has no name")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = read_value(arguments, f"{where}.arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        found = kind_of(arguments)
        raise BadRow(f"{where}: the call's arguments are {found}, an object was expected")
    call = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
    return {"id": value["id"], **call} if isinstance(value.get("id"), str) else call


def tools(value: Any, where: str) -> list[Turn]:
    """Tool definitions as `[{"type": "function", "function": {…}}]`, [] for none.

    Args:
        value: A list, a string that holds one as JSON ("" and "[]" mean none), or None.
        where: The column, for messages.

    Raises:
        BadRow: It is no list of named tools.
    """
    if isinstance(value, str):
        value = read_value(value, where) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"{where} is {kind_of(value)}, a list of tools was expected")
    return [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(value)]


def _tool(value: Any, where: str) -> Turn:
    if isinstance(value, str):
        value = read_value(value, where)
    if not isinstance(value, dict):
        raise BadRow(f"{where} is {kind_of(value)}, an object was expected")
    inner = value.get("function", value)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise BadRow(f"{where}: the tool has no name")
    return value if "function" in value else {"type": "function", "function": value}
