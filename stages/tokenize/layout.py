"""A chat as text, with the places its turns begin and its answers stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stages.tokenize.answers import Answer, Chat, Tools
from stages.tokenize.template import Message, Template


class Layout(NamedTuple):
    """A rendered chat.

    Attributes:
        text: All of it.
        answers: Start and end border of every assistant turn, in order (stages.tokenize.answers).
        turns: Position of the start of every question that follows an answer: where a chat is
            best cut.
        system_end: Position after the system prompt, 0 where it does not stand apart.
    """

    text: str
    answers: list[Answer]
    turns: list[int]
    system_end: int


def find(template: Template, messages: Sequence[Message], tools: Tools = None) -> Layout:
    """Render a chat and find its turns.

    Raises:
        Refused: The template refuses the chat.
    """
    text = template.render(messages, tools)
    chat = Chat(template, messages, tools, text)
    answers: list[Answer] = []
    floor = 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            answers.append(chat.answer(i, floor))
            floor = answers[-1][1][0]
    return Layout(
        text=text,
        answers=answers,
        turns=list(_turns(messages, answers)),
        system_end=_system_end(chat, answers),
    )


def _turns(messages: Sequence[Message], answers: Sequence[Answer]) -> Iterator[int]:
    """Ends of answers that a question follows."""
    at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    seen = 0
    for i, (_, end) in zip(at, answers, strict=True):
        asked = i + 1 < len(messages) and messages[i + 1]["role"] in ("user", "system")
        if asked and end[0] > seen:  # else the template left the answer out
            yield end[0]
        seen = end[0]


def _system_end(chat: Chat, answers: Sequence[Answer]) -> int:
    """Where the first turn after the system prompt begins."""
    roles = [message["role"] for message in chat.messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), None)
    if first is None:
        return 0
    if roles[first] == "assistant":
        start = answers[0][0][0]
        return start - matched(chat.template, chat.text, start)
    words, header = chat.words(first), chat.template.user_header
    stands = words is not None and header and chat.text.endswith(header, 0, words[0])
    return words[0] - len(header) if words and stands else 0


def matched(template: Template, text: str, end: int) -> int:
    """How much of the start of the generation prompt `text[:end]` ends in, in characters."""
    prompt = template.generation_prompt
    lengths = [len(prompt), *reversed(template.stops(prompt))]
    return next((n for n in lengths if text.endswith(prompt[:n], 0, end)), 0)
