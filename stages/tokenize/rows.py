"""One row to text: which template turns it goes through and which of its answers are trained.

| form | text | targets |
|---|---|---|
| text | as it is, plus the end-of-text token | every token |
| completion | a chat of (system,) user and assistant | the answer, with its end of turn |
| chat | by the template, tools and calls included | the answers that `tokenize.train_on` names |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from stages.core.config.schema import Tokenize
from stages.tokenize import layout
from stages.tokenize.answers import Answer
from stages.tokenize.layout import Layout
from stages.tokenize.shapes import Shapes
from stages.tokenize.template import Message, Refused, Template

PLAIN = {"role", "content"}
OWN_WORDS = ("content", "reasoning_content")


class BadRow(Exception):
    """A row the template cannot render; the text is the reason."""


class Rendered(NamedTuple):
    """A row as text.

    Attributes:
        text: What is encoded.
        spans: Start and end border of every trained answer; None: every token is a target.
        turns: As in Layout.
        system_end: As in Layout.
        ends_itself: The template writes the end of the row; false for a text.
        words: The row's own strings, without what the template puts around them.
    """

    text: str
    spans: list[Answer] | None
    turns: list[int]
    system_end: int
    ends_itself: bool
    words: list[str]


class Renderer:
    """Renders rows of every form under one template and one set of `tokenize.*` settings.

    Attributes:
        without_system: Chats so far that have no system turn.
        merged: Chats whose system text went into a user turn.
        empty_answers: Assistant turns without words or calls.
    """

    def __init__(self, template: Template | None, settings: Tokenize) -> None:
        self.without_system = self.merged = self.empty_answers = 0
        self._template = template
        self._settings = settings
        self._shapes = Shapes(template) if template else None

    def render(self, kind: str, record: str) -> Rendered:
        """Render one row of `data/raw/`.

        Args:
            kind: `text`, `completion` or `chat`.
            record: The row as JSON.

        Raises:
            BadRow: The template refuses it, or has no place for part of it.
        """
        row = json.loads(record)
        if kind == "text":
            text = row["text"]
            return Rendered(encodable(text), None, [], 0, False, [text])
        messages = exchange(row) if kind == "completion" else row["messages"]
        try:
            messages, found = self._chat(messages, row.get("tools") or None)
        except Refused as refused:
            raise BadRow(f"the chat template refuses it: {refused}") from refused
        return Rendered(
            text=encodable(found.text),
            spans=self._trained(messages, found),
            turns=found.turns,
            system_end=found.system_end,
            ends_itself=True,
            words=[m[key] for m in messages for key in OWN_WORDS if key in m],
        )

    def _chat(self, messages: list[Message], tools: Any) -> tuple[list[Message], Layout]:
        """The turns as the template gets them, and where they stand in its text."""
        assert self._template is not None and self._shapes is not None
        messages = self._with_system_role(messages)
        simple = tools is None and all(message.keys() == PLAIN for message in messages)
        if not simple:
            messages = [plain(message, self._template.call_arguments) for message in messages]
            simple = tools is None and all(message.keys() == PLAIN for message in messages)
        refuse_unsupported(self._template, messages, tools)
        self.empty_answers += sum(
            message["role"] == "assistant" and not message["content"] and message.keys() == PLAIN
            for message in messages
        )
        if simple:
            return messages, self._shapes.layout(messages)
        tools = tools and [openai(tool) for tool in tools]
        try:
            return messages, layout.find(self._template, messages, tools)
        except Refused:
            named = with_call_ids(messages)  # some templates demand them
            if named == messages:
                raise
            return named, layout.find(self._template, named, tools)

    def _with_system_role(self, messages: list[Message]) -> list[Message]:
        assert self._template is not None
        if not any(message["role"] == "system" for message in messages):
            self.without_system += 1
            return messages
        if self._template.system_role:
            return messages
        if self._settings.system_role != "merge":
            raise BadRow("the chat template has no system role")
        self.merged += 1
        return merge_system(messages)

    def _trained(self, messages: Sequence[Message], found: Layout) -> list[Answer] | None:
        train_on = self._settings.train_on
        if train_on == "all":
            return None
        if train_on == "assistant":
            return found.answers
        if train_on == "completion" and messages[-1]["role"] != "assistant":
            return []
        return found.answers[-1:]


def exchange(row: dict[str, str]) -> list[Message]:
    """A prompt and completion as a chat."""
    turns = [("system", row.get("system")), ("user", row["prompt"])]
    turns.append(("assistant", row["completion"]))
    return [{"role": role, "content": content} for role, content in turns if content is not None]


def merge_system(messages: Sequence[Message]) -> list[Message]:
    """Put system text before the words of the next user turn, or make it one where none follows."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif waiting:
            text = "\n\n".join(waiting)
            waiting = []
            if message["role"] == "user":
                merged.append({**message, "content": f"{text}\n\n{message['content']}"})
            else:
                merged += [{"role": "user", "content": text}, message]
        else:
            merged.append(message)
    return merged + [{"role": "user", "content": text} for text in waiting]


def plain(message: Message, arguments: str) -> Message:
    """A turn without empty fields, `content` a string, a call's arguments as the template wants.

    Reasoning is given under both names that templates read, as transformers does.
    """
    kept = {key: value for key, value in message.items() if value is not None and value != []}
    kept.setdefault("content", "")
    if kept.get("reasoning_content"):
        kept.setdefault("thinking", kept["reasoning_content"])
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call, arguments) for call in kept["tool_calls"]]
    return kept


def _call(call: dict[str, Any], form: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if form == "string" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if form != "string" and isinstance(arguments, str):
        arguments = _parsed(arguments)
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {
        **{k: v for k, v in call.items() if k in ("id",)},
        "type": "function",
        "function": named,
    }


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Give calls without an id one of nine letters and digits, and their answers the same."""
    named: list[Message] = []
    open_calls: list[str] = []
    count = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            calls.append({"id": f"call{count:05d}", **call})
            count += 1
        open_calls += [call["id"] for call in calls]
        answers = message["role"] == "tool" and open_calls
        named.append(
            {
                **({"tool_call_id": open_calls.pop(0)} if answers else {}),
                **message,
                **({"tool_calls": calls} if calls else {}),
            }
        )
    return named


def openai(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool definition in the form templates expect, `{"type": "function", "function": …}`."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def refuse_unsupported(template: Template, messages: Sequence[Message], tools: Any) -> None:
    """Refuse what the template would leave out in silence.

    Raises:
        BadRow: The row has tools, calls, tool answers or reasoning, and the template has no place
            for them.
    """
    if tools and not template.tools:
        raise BadRow("the chat template has no place for tools")
    if any("tool_calls" in message for message in messages) and not template.call_arguments:
        raise BadRow("the chat template has no place for tool calls")
    if any(message["role"] == "tool" for message in messages) and not template.tool_role:
        raise BadRow("the chat template leaves out what a tool answered")
    if any("reasoning_content" in message for message in messages) and not template.reasoning:
        raise BadRow("the chat template has no place for reasoning")


def encodable(text: str) -> str:
    """The text itself.

    Raises:
        BadRow: It holds a lone surrogate, which no tokenizer can encode.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            character = f"U+{ord(text[error.start]):04X}"
            raise BadRow(f"it holds half a character, the lone surrogate {character}") from error
    return text
