"""Where an answer begins and ends in a rendered chat, found so that no template can shift it.

The text of the whole chat is compared with the text of the chat up to an answer:

* An answer begins where the prompt for it (the messages before it, with the generation prompt)
  stops being a prefix of the whole; it ends where the chat up to and including it does.
* Templates rewrite earlier turns once later ones follow: think blocks are taken out, an end token
  stands only at the very end. Then the rest of the shorter text is looked for in the whole one.
* Where that fails too, the chat is rendered once more with other words in that turn: what differs
  is the turn.

A border is (position, whole). A token that a border cuts belongs to the text before it, for the
prompt is encoded with that text; unless the two texts part inside it (`whole` false), then to the
text after it, for no prompt holds that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stages.tokenize.template import Message, Refused, Template, common_prefix

Border = tuple[int, bool]
Answer = tuple[Border, Border]
Tools = Sequence[dict[str, Any]] | None

PROBE = "\uf8f0\uf8f1"
"""Private-use characters: no template writes them, and a chat that has them differs elsewhere."""


class Chat(NamedTuple):
    """A chat and its rendered text."""

    template: Template
    messages: Sequence[Message]
    tools: Tools
    text: str

    def answer(self, i: int, floor: int) -> Answer:
        """The borders of assistant turn `i`, which begins at `floor` or later.

        Its end token and what follows it in the turn belong to it. Both borders are equal where
        the template leaves the turn out.
        """
        words = None
        if self.template.drops:  # a shorter chat may then be a prefix of the whole by chance
            words = self.words(i)
            if words is None or words[0] < floor:
                return (floor, True), (floor, True)
        start = self._start_by_prompt(i)
        if start is not None and start[0] >= floor:
            end = self._end_by_chat(i, start[0])
            if end is not None and (words is None or start[0] <= words[0] <= words[1] <= end[0]):
                return start, end
        return self._by_change(i, floor) or ((floor, True), (floor, True))

    def _before(self, i: int, generation_prompt: bool = False) -> str | None:
        """The first `i` messages as text; None where the template refuses them alone."""
        try:
            return self.template.render(self.messages[:i], self.tools, generation_prompt)
        except Refused:
            return None

    def _start_by_prompt(self, i: int) -> Border | None:
        if i == 0:
            return None  # no template is made for the prompt of nothing
        prompt = self._before(i, generation_prompt=True)
        if prompt is None:
            return None
        if self.text.startswith(prompt):
            return len(prompt), True
        bare = self._before(i)
        if bare is None or not (self.text.startswith(bare) and prompt.startswith(bare)):
            return None
        shared, whole = self.template.shared(self.text[len(bare) :], prompt[len(bare) :])
        return (len(bare) + shared, whole) if shared else None

    def _end_by_chat(self, i: int, start: int) -> Border | None:
        if i + 1 == len(self.messages):
            return len(self.text), True
        chat = self._before(i + 1)
        if chat is None or len(chat) < start:
            return None
        if self.text.startswith(chat):
            return len(chat), True
        footer = self.template.answer_footer
        words_end = len(chat) - len(footer)
        if words_end >= start and chat.endswith(footer) and self.text.startswith(chat[:words_end]):
            shared, whole = self.template.shared(self.text[words_end:], footer)
            return words_end + shared, whole
        # What the shorter text has before the answer's words may be gone from the whole one.
        key = self.text[start : start + max(1, len(footer))]
        at = chat.find(key, start)
        while at >= 0:
            if self.text.startswith(chat[at:], start):
                return start + len(chat) - at, True
            at = chat.find(key, at + 1)
        return None

    def _by_change(self, i: int, floor: int) -> Answer | None:
        """The borders of turn `i` from where its words stand; None where they do not come out."""
        words = self.words(i)
        if words is None:
            return None
        start = self._start_by_tail(i, words[0])
        if start is None or not floor <= start[0] <= words[1]:
            start = self._header_end(floor, words[0], self.template.generation_prompt)
        return start or (words[0], True), self._end_by_tail(i, words[1])

    def words(
        self, i: int, until: int | None = None, generation_prompt: bool = False
    ) -> tuple[int, int] | None:
        """Where the words of message `i` stand in the text of the first `until` messages.

        None where they do not come out, or the template refuses such a chat.
        """
        messages = self.messages[:until]
        changed = [*messages[:i], _changed(messages[i]), *messages[i + 1 :]]
        text = self.text
        try:
            if until is not None:
                text = self.template.render(messages, self.tools, generation_prompt)
            other = self.template.render(changed, self.tools, generation_prompt)
        except Refused:
            return None
        if other.count(PROBE) != 1:
            return None
        before, _, after = other.partition(PROBE)
        start = common_prefix(text, before)
        shared = common_prefix(text[start:][::-1], after[::-1])
        return start, len(text) - shared

    def _start_by_tail(self, i: int, words: int) -> Border | None:
        """Where the text parts from the prompt, both read from the words of the turn before."""
        if i == 0:
            return None
        prompt, bare = self._before(i, generation_prompt=True), self._before(i)
        there, here = self.words(i - 1, i, generation_prompt=True), self.words(i - 1)
        if prompt is None or there is None or here is None:
            return None
        shared, whole = self.template.shared(self.text[here[1] :], prompt[there[1] :])
        if whole:
            return here[1] + shared, True
        # They may part before the header of the answer, if more stands before it here.
        header = prompt[len(bare) :] if bare and prompt.startswith(bare) else ""
        later = self._header_end(here[1] + shared, words, header)
        return later or ((here[1] + shared, False) if shared else None)

    def _header_end(self, floor: int, words: int, header: str) -> Border | None:
        """The end of a generation prompt, or of as much of it as stands before the words."""
        for length in [stop for stop in reversed(self.template.stops(header)) if stop]:
            at = self.text.rfind(header[:length], floor, words)
            if at >= 0:
                shared, whole = self.template.shared(self.text[at:], header)
                return at + shared, whole
        return None

    def _end_by_tail(self, i: int, words_end: int) -> Border:
        """The end of what the template puts after the words of turn `i`."""
        tail = self.template.answer_footer
        chat, words = self._before(i + 1), self.words(i, i + 1)
        if chat is not None and words is not None:
            tail = chat[words[1] :]
        shared, whole = self.template.shared(self.text[words_end:], tail)
        return words_end + shared, whole


def _changed(message: Message) -> Message:
    """The message with other words, or with another name in its call where it only calls."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": PROBE}
    function = {**calls[-1]["function"], "name": PROBE}
    return {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
