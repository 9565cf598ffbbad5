"""The chat template as a function from messages to text, and what it can and cannot do.

Compiled once with the sandbox transformers itself uses, then called directly: a call of
`apply_chat_template` per row costs twice as much. Two things differ from a bare call, both so that
equal rows give equal tokens on every machine and day: `strftime_now` always says the same date,
and `enable_thinking` is what mlx-lm passes (whether the vocabulary has a think token).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from stages.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

FIXED_DATE = datetime.date(2024, 7, 26)
"""What `strftime_now` says: the date Llama 3.1's own template falls back to."""

THINK_TOKENS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
)
"""Pairs that make mlx-lm (tokenizer_utils) call a model a thinking one."""

TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}


FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template can raise by its own expressions while it renders."""


PROBES = (
    ("user", "first_question"),
    ("assistant", "first_answer"),
    ("user", "last_question"),
    ("assistant", "last_answer"),
)
"""A plain chat, each turn to be found again by its words."""


LONG_CHAT = 64
"""Turns of a chat that shows whether a template keeps the last few only."""


class Refused(Exception):
    """The template raised on these messages; the text is its own words."""


@dataclass(frozen=True, eq=False)
class Template:
    """A compiled chat template.

    Attributes:
        plain: Template for chats without tools.
        with_tools: Template for chats with tools (the same, but for tokenizers that hold two).
        source: The Jinja text of `plain`.
        words: Values the template sees beside the messages (special tokens and the like).
        stops: Gives for a text the positions where its tokens end.
    """

    plain: jinja2.Template
    with_tools: jinja2.Template
    source: str
    words: dict[str, Any]
    stops: Callable[[str], Sequence[int]]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> str:
        """Render a chat to text.

        Raises:
            Refused: The template raised (roles that do not alternate, a role it does not know, a
                field it needs, a division by zero).
        """
        template = self.with_tools if tools else self.plain
        try:
            return template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.words,
            )
        except FAILURES as error:
            raise Refused(_reason(error)) from error

    def tries(self, messages: Sequence[Message], tools: Sequence[dict] | None = None) -> str:
        """Like `render`, but "" where the template refuses."""
        try:
            return self.render(messages, tools)
        except Refused:
            return ""

    @cached_property
    def system_role(self) -> bool:
        """Whether a system turn's words come out; a template may refuse them or drop them."""
        turns = [_turn("system", "probe_system"), _turn("user", "probe_user")]
        return "probe_system" in self.tries(turns)

    @cached_property
    def tools(self) -> bool:
        """Whether tool definitions come out."""
        return "probe_tool" in self.tries([_turn("user", "probe_user")], [TOOL])

    @cached_property
    def tool_role(self) -> bool:
        """Whether the answer of a tool comes out."""
        return any("probe_result" in text for _, text in self._calls())

    @cached_property
    def reasoning(self) -> bool:
        """Whether the reasoning of the last answer comes out (`reasoning_content`)."""
        answer = _turn("assistant", "probe_answer")
        answer |= {"reasoning_content": "probe_reason", "thinking": "probe_reason"}
        return "probe_reason" in self.tries([_turn("user", "probe_user"), answer])

    @cached_property
    def call_arguments(self) -> str:
        """How the template wants a call's arguments: `object`, `string`, or "" for not at all.

        Some print an object as JSON or key by key and would quote a string twice; some add a
        string to their own and would print an object the Python way.
        """
        for form, text in self._calls():
            called = "probe_tool" in text.partition("probe_user")[2]
            wrong = "'probe_key'" in text or '\\"probe_key' in text
            if called and "probe_value" in text and not wrong:
                return form
        return ""

    @cached_property
    def disorder(self) -> str:
        """Why no mask can be trusted: turns out of their order, or another text each time."""
        turns = [_turn(role, mark) for role, mark in PROBES]
        text = self.tries(turns)
        if self.tries(turns) != text:
            return "it renders the same chat as two different texts"
        places = [text.casefold().find(mark) for _, mark in PROBES]
        written = [place for place in places if place >= 0]
        return "" if written == sorted(written) else "it writes the turns in another order"

    @cached_property
    def left_out(self) -> list[str]:
        """Which turns of a chat do not come out; none where the template refuses such a chat."""
        text = self.tries([_turn(role, mark) for role, mark in PROBES]).casefold()
        return [mark.replace("_", " ") for _, mark in PROBES if text and mark not in text]

    @cached_property
    def drops(self) -> bool:
        """Whether turns of a long plain chat do not come out (the last ones alone, say)."""
        turns = [_turn(PROBES[i % 2][0], f"probe_{i:03d}") for i in range(LONG_CHAT)]
        text = self.tries(turns).casefold()
        return bool(text) and any(turn["content"] not in text for turn in turns)

    def _calls(self) -> Iterator[tuple[str, str]]:
        """A chat with one call, its arguments in both forms, without and with the definition."""
        for form in ("object", "string"):
            arguments: Any = {"probe_key": "probe_value"}
            if form == "string":
                arguments = json.dumps(arguments)
            function = {"name": "probe_tool", "arguments": arguments}
            call = {"id": "probe0001", "type": "function", "function": function}
            turns = [
                _turn("user", "probe_user"),
                _turn("assistant", "") | {"tool_calls": [call]},
                _turn("tool", "probe_result") | {"name": "probe_tool", "tool_call_id": "probe0001"},
                _turn("assistant", "probe_answer"),
            ]
            yield form, self.tries(turns)
            yield form, self.tries(turns, [TOOL])

    @cached_property
    def generation_prompt(self) -> str:
        """What stands before an answer, `<|im_start|>assistant\\n` in ChatML; "" if unknown."""
        user = [_turn("user", "probe_user")]
        try:
            bare, prompt = self.render(user), self.render(user, generation_prompt=True)
        except Refused:
            return ""
        return prompt[len(bare) :] if prompt.startswith(bare) else ""

    @cached_property
    def answer_footer(self) -> str:
        """What stands after the last answer, `<|im_end|>\\n` in ChatML; "" if unknown."""
        text = self.tries([_turn("user", "probe_user"), _turn("assistant", "probe_answer")])
        return text.partition("probe_answer")[2]

    @cached_property
    def user_header(self) -> str:
        """What stands before a later question, `<|im_start|>user\\n` in ChatML; "" if unknown."""
        turns = [("user", "probe_user"), ("assistant", "probe_answer"), ("user", "probe_next")]
        text = self.tries([_turn(*turn) for turn in turns])
        between = text.partition("probe_answer")[2].partition("probe_next")[0]
        return between[self.shared(between, self.answer_footer)[0] :]

    @cached_property
    def default_system(self) -> str:
        """System text the template adds to a chat that has none; "" where it adds none."""
        head = self.tries([_turn("user", "probe_user")]).partition("probe_user")[0]
        if not self.user_header or not head.endswith(self.user_header):
            return ""
        text = head.removesuffix(self.user_header)
        return "" if text == self.words.get("bos_token") else text

    def shared(self, text: str, tail: str) -> tuple[int, bool]:
        """How much of `tail` a text begins with, in whole tokens of `tail`; and whether all of it.

        `<|im_end|>` and `<|im_start|>` share nothing, though their first letters are equal.
        """
        if text.startswith(tail):
            return len(tail), True
        shared = common_prefix(text, tail)
        return max((stop for stop in self.stops(tail) if stop <= shared), default=0), False

    @cached_property
    def writes_date(self) -> bool:
        """Whether the template asks for today's date."""
        return "strftime_now" in self.source


def load_template(tokenizer: PreTrainedTokenizerBase, file: str | None = None) -> Template | None:
    """Compile a tokenizer's chat template; None for a base model that has none.

    Args:
        tokenizer: The model's tokenizer, with the template to use.
        file: `tokenize.chat_template`, where the template came from; None for the model's own.

    Raises:
        UserError: The template is no Jinja.
    """
    if not tokenizer.chat_template:
        return None
    source = tokenizer.get_chat_template(None, None)
    with_tools = tokenizer.get_chat_template(None, [TOOL])
    vocabulary = tokenizer.get_vocab()
    thinking = any(start in vocabulary and end in vocabulary for start, end in THINK_TOKENS)
    backend = tokenizer.backend_tokenizer

    def stops(text: str) -> list[int]:
        return [end for _, end in backend.encode(text, add_special_tokens=False).offsets]

    words = {
        **tokenizer.special_tokens_map,
        "enable_thinking": thinking,
        "strftime_now": FIXED_DATE.strftime,
    }
    return Template(
        plain=_compiled(source, file),
        with_tools=_compiled(with_tools, file),
        source=source,
        words=words,
        stops=lru_cache(maxsize=256)(stops),
    )


def _compiled(source: str, file: str | None) -> jinja2.Template:
    try:
        template = _compile_jinja_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            "The chat template cannot be used",
            where=f"{file or 'the chat template of the model'}, line {error.lineno}",
            found=error.message,
            expected="a Jinja template",
            fix=f"mend line {error.lineno} of {file}"
            if file
            else "set tokenize.chat_template to a file with a whole template",
        ) from error
    template.globals = dict(template.globals)  # as a chain of mappings each render copies it slowly
    return template


def common_prefix(left: str, right: str) -> int:
    """How many characters two texts share at their start."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
