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
        turns: Position of the start of every later turn.
        asks: For each of `turns`: a question begins there (a chat is best cut there).
        system_end: Position after the system prompt, 0 where it does not stand apart.
    """

    text: str
    answers: list[Answer]
    turns: list[int]
    asks: list[bool]
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
    turns = list(_turns(template, messages, text, answers))
    return Layout(
        text=text,
        answers=answers,
        turns=[at for at, _ in turns],
        asks=[ask for _, ask in turns],
        system_end=_system_end(template, messages, text, turns),
    )


def _turns(
    template: Template,
    messages: Sequence[Message],
    text: str,
    answers: Sequence[Answer],
) -> Iterator[tuple[int, bool]]:
    """Starts of the turns after the first: the header of an answer, and what follows an answer."""
    at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = template.generation_prompt
    seen = 0
    for i, (start, end) in zip(at, answers, strict=True):
        if start == end:
            continue
        header = start[0] - _matched(text, start[0], prompt, template)
        if seen < header < start[0]:
            yield header, False
        seen = end[0]
        if i + 1 < len(messages):
            yield end[0], messages[i + 1]["role"] in ("user", "system")


def _matched(text: str, end: int, prompt: str, template: Template) -> int:
    """How much of the start of the generation prompt `text[:end]` ends in."""
    lengths = [len(prompt), *reversed(template.stops(prompt))]
    return next((n for n in lengths if text.endswith(prompt[:n], 0, end)), 0)


def _system_end(
    template: Template, messages: Sequence[Message], text: str, turns: Sequence[tuple[int, bool]]
) -> int:
    """Where the first turn after the system prompt begins."""
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    after = text.find(system) + len(system) if system in text else 0
    first = next((message for message in messages if message["role"] != "system"), None)
    if first is not None and first["role"] == "assistant" and turns:
        return turns[0][0] if not turns[0][1] else 0
    at = text.find(template.user_header, after) if template.user_header else -1
    return max(at, 0)


def rest_of_prompt(template: Template, layout: Layout, answer: int) -> str:
    """What the generation prompt holds beyond the start of an answer ("<think>\\n"), else ""."""
    at, whole = layout.answers[answer][0]
    prompt = template.generation_prompt
    return "" if whole else prompt[_matched(layout.text, at, prompt, template) :]
