"""The fast way to a chat's layout: what a template puts around the words, learned once per shape.

The shape of a chat is its sequence of roles. For each shape the template is rendered once with
marks in place of the words; the text between the marks is the skeleton, and the layout found there
(stages.tokenize.layout) holds for every chat of that shape whose rendered text equals the skeleton
filled with its words. That equality is tested on every row, so a template that looks at the words
(think blocks, commands in a question) only costs speed: such a row goes the slow way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stages.tokenize import layout
from stages.tokenize.layout import Layout
from stages.tokenize.template import Message, Refused, Template

PAD = "\n \t"
MOST_SHAPES = 4096
STRIPS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (True, True): str,
    (False, False): str.strip,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
}
"""(White space before the words comes out, behind them comes out) → what the template does."""

Spot = tuple[int, int]
"""A position: (how many turns' words stand before it, characters after the last of them)."""


class Skeleton(NamedTuple):
    """What a template puts around the words of chats of one shape.

    Attributes:
        segments: The text before, between and after the words; one more than there are turns.
        order: The turns as their words follow each other in the text (some templates move the
            system turn to the last question).
        strips: For each of `order`, what the template does to white space around the words.
        answers: As in Layout, with `Spot` for a position.
        turns: As in Layout.
        system_end: As in Layout.
        rests: For each answer, (its turn, what else a generation prompt would hold there).
    """

    segments: list[str]
    order: list[int]
    strips: list[Callable[[str], str]]
    answers: list[tuple[tuple[Spot, bool], tuple[Spot, bool]]]
    turns: list[Spot]
    system_end: Spot
    rests: list[tuple[int, str]]

    def fill(self, contents: Sequence[str]) -> Layout | None:
        """The layout of a chat with these words; None where its answers need a closer look."""
        pieces = [self.segments[0]]
        ends = [0]
        at = len(self.segments[0])
        for turn, strip, segment in zip(self.order, self.strips, self.segments[1:], strict=True):
            words = strip(contents[turn])
            at += len(words)
            ends.append(at)
            at += len(segment)
            pieces += (words, segment)
        for turn, rest in self.rests:
            if contents[turn].lstrip().startswith(rest.lstrip()[:1] or rest):
                return None  # the answer may begin as the generation prompt ends
        return Layout(
            text="".join(pieces),
            answers=[
                ((ends[a] + b, starts_whole), (ends[c] + d, ends_whole))
                for ((a, b), starts_whole), ((c, d), ends_whole) in self.answers
            ],
            turns=[ends[turn] + after for turn, after in self.turns],
            system_end=ends[self.system_end[0]] + self.system_end[1],
        )


class Shapes:
    """The skeletons of one template, learned as shapes turn up."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._known: dict[tuple[str, ...], Skeleton | None] = {}

    def layout(self, messages: Sequence[Message]) -> Layout:
        """Render a chat of plain turns (`role` and `content` only) and find its turns.

        Raises:
            Refused: The template refuses the chat.
        """
        shape = tuple([message["role"] for message in messages])
        if shape not in self._known:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[shape] = learn(self._template, shape)
        skeleton = self._known[shape]
        if skeleton is not None:
            filled = skeleton.fill([message["content"] for message in messages])
            if filled is not None and filled.text == self._template.render(messages):
                return filled
        return layout.find(self._template, messages)


def learn(template: Template, shape: Sequence[str]) -> Skeleton | None:
    """The skeleton of a shape; None where the template refuses it or hides or repeats a turn."""
    marks = [f"\ue000{i}\ue001" for i in range(len(shape))]
    try:
        found = layout.find(template, _chat(shape, marks))
        padded = template.render(_chat(shape, [PAD + mark + PAD for mark in marks]))
    except Refused:
        return None
    if any(found.text.count(mark) != 1 for mark in marks):
        return None
    order = sorted(range(len(marks)), key=lambda turn: found.text.index(marks[turn]))
    marks = [marks[turn] for turn in order]
    spots = _Spots(found.text, marks)
    turns = [i for i, role in enumerate(shape) if role == "assistant"]
    rests = [(turn, _rest(template, found, n)) for n, turn in enumerate(turns)]
    return Skeleton(
        segments=re.split("|".join(marks), found.text),
        order=order,
        strips=[_strip(padded, mark) for mark in marks],
        answers=[
            ((spots.of(start), starts_whole), (spots.of(end), ends_whole))
            for (start, starts_whole), (end, ends_whole) in found.answers
        ],
        turns=[spots.of(turn) for turn in found.turns],
        system_end=spots.of(found.system_end),
        rests=[(turn, rest) for turn, rest in rests if rest],
    )


def _rest(template: Template, found: Layout, answer: int) -> str:
    """What the generation prompt holds beyond the start of an answer ("<think>\\n"), else ""."""
    at, whole = found.answers[answer][0]
    rest = template.generation_prompt[layout.matched(template, found.text, at) :]
    return "" if whole else rest


def _chat(shape: Sequence[str], contents: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in zip(shape, contents, strict=True)]


def _strip(padded: str, mark: str) -> Callable[[str], str]:
    """Which white space around the words comes out."""
    before, _, after = padded.partition(mark)
    return STRIPS[before.endswith(PAD), after.startswith(PAD)]


class _Spots:
    """Positions in the marked text as `Spot`."""

    def __init__(self, text: str, marks: Sequence[str]) -> None:
        self._ends = [0] + [text.index(mark) + len(mark) for mark in marks]

    def of(self, position: int) -> Spot:
        before = max(i for i, end in enumerate(self._ends) if end <= position)
        return before, position - self._ends[before]
