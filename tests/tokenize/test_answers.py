"""Which tokens are targets, written out by hand for templates that do what real ones do."""

import json

import pytest

from stages.core.config.schema import Tokenize
from stages.tokenize import tally
from stages.tokenize.encode import assemble, encode_texts
from stages.tokenize.rows import Renderer
from stages.tokenize.template import load_template
from stages.tokenize.vocabulary import read_vocabulary
from tests.tokenize import chats
from tests.tokenize.chats import call, turn

TWO = [turn("user", "Q1"), turn("assistant", "A1")]
LONG = [turn("system", "S"), *TWO, turn("user", "Q2"), turn("assistant", "A2"), turn("user", "Q3")]
THOUGHT = [
    turn("user", "Q1"),
    turn("assistant", "<think>\nhm\n</think>\n\nA1"),
    turn("user", "Q2"),
    turn("assistant", "<think>\nso\n</think>\n\nA2"),
]
CALLS = [
    turn("user", "Q1"),
    turn("assistant", None, tool_calls=[call("f", '{"x": "v"}')]),
    turn("tool", "R"),
    turn("assistant", "A1"),
]
TOOL = [{"name": "f", "parameters": {"type": "object"}}]
TOOL_TEXT = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'

CASES = {
    "two turns": (
        chats.CHATML,
        {"messages": TWO},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "every answer, nothing of the last question": (
        chats.CHATML,
        {"messages": LONG},
        "<|start|>system\nS<|end|>\n<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧"
        "<|start|>user\nQ2<|end|>\n<|start|>assistant\n⟦A2<|end|>\n⟧<|start|>user\nQ3<|end|>\n",
    ),
    "system turn of the template": (
        chats.DEFAULT_SYSTEM,
        {"messages": TWO},
        "<|start|>system\nBe kind.<|end|>\n<|start|>user\nQ1<|end|>\n"
        "<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "trimmed white space": (
        chats.TRIM,
        {"messages": [turn("user", " Q1\n"), turn("assistant", "\n A1 ")]},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "an answer first": (
        chats.CHATML,
        {"messages": [turn("assistant", "A0"), *TWO]},
        "<|start|>assistant\n⟦A0<|end|>\n⟧<|start|>user\nQ1<|end|>\n"
        "<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "an empty answer trains its end": (
        chats.CHATML,
        {"messages": [turn("user", "Q1"), turn("assistant", "")]},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦<|end|>\n⟧",
    ),
    "prompt with a think block that the chat lacks": (
        chats.THINK_PROMPT,
        {"messages": TWO},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "the same, and the answer begins with its first letter": (
        chats.THINK_PROMPT,
        {"messages": [turn("user", "Q1"), turn("assistant", "<b>A1")]},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦<b>A1<|end|>\n⟧",
    ),
    "the same, and the answer has the block": (
        chats.THINK_PROMPT,
        {"messages": [turn("user", "Q1"), turn("assistant", "<think>\nhm</think>A1")]},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n<think>\n⟦hm</think>A1<|end|>\n⟧",
    ),
    "think blocks taken out of earlier answers": (
        chats.THINK_LAST,
        {"messages": THOUGHT},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧<|start|>user\nQ2<|end|>\n"
        "<|start|>assistant\n⟦<think>\nso\n</think>\n\nA2<|end|>\n⟧",
    ),
    "think block put before the last answer": (
        chats.THINK_LAST,
        {"messages": LONG[1:5]},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧<|start|>user\nQ2<|end|>\n"
        "<|start|>assistant\n⟦<think>\n\n</think>\n\nA2<|end|>\n⟧",
    ),
    "another end after the last answer": (
        chats.CLOSE_LAST,
        {"messages": LONG[1:5]},
        "<|start|>user\nQ1<|end|><|start|>assistant\n⟦A1⟧<|end|><|start|>user\nQ2<|end|>"
        "<|start|>assistant\n⟦A2<|close|>⟧",
    ),
    "system text in the last question": (
        chats.SYSTEM_LATE,
        {"messages": LONG},
        "<s>[Q]Q1[/Q]⟦A1<|end|>⟧[Q]Q2[/Q]⟦A2<|end|>⟧[Q]S\n\nQ3[/Q]",
    ),
    "a call and its result": (
        chats.TOOLS,
        {"messages": CALLS, "tools": TOOL},
        f"<|start|>system\n{TOOL_TEXT}<|end|>\n<|start|>user\nQ1<|end|>\n<|start|>assistant\n"
        '⟦{"name": "f", "arguments": {"x": "v"}}<|end|>\n⟧<|start|>tool\nR<|end|>\n'
        "<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "arguments as an object where a string is wanted": (
        chats.TOOLS_STRING,
        {"messages": [turn("user", "Q1"), turn("assistant", "", tool_calls=[call("f", {"x": 1})])]},
        '<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦{"name": "f", "arguments": {"x": 1}}'
        "<|end|>\n⟧",
    ),
    "call ids where the template demands them": (
        chats.TOOL_IDS,
        {"messages": CALLS},
        '<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦{"name": "f", "arguments": {"x": "v"}}'
        "<|end|>\n⟧<|start|>tool\nR<|end|>\n<|start|>assistant\n⟦A1<|end|>\n⟧",
    ),
    "reasoning in a field of its own": (
        chats.REASONING,
        {"messages": [turn("user", "Q1"), turn("assistant", "A1", reasoning_content="R")]},
        "<|start|>user\nQ1<|end|>\n<|start|>assistant\n⟦<think>\nR\n</think>\nA1<|end|>\n⟧",
    ),
    "letters of several bytes": (
        chats.CHATML,
        {"messages": [turn("user", "né 日本"), turn("assistant", "👩‍👩‍👧 שלום")]},
        "<|start|>user\nné 日本<|end|>\n<|start|>assistant\n⟦👩‍👩‍👧 שלום<|end|>\n⟧",
    ),
}


def marked(template, kind, record, **settings):
    """Render, encode and decode one row, its targets in brackets."""
    tokenizer = chats.tokenizer(template)
    compiled = load_template(tokenizer)
    renderer = Renderer(compiled, Tokenize(**settings))
    vocabulary = read_vocabulary(tokenizer, [], compiled.answer_footer)
    rows = [renderer.render(kind, json.dumps(record)) for _ in range(2)]
    assert rows[0] == rows[1]
    encodings = encode_texts(vocabulary, [rows[0].text])
    encoded = assemble(vocabulary, rows[:1], encodings, settings.get("end_token", "auto"))

    def decode(ids):
        return vocabulary.backend.decode(ids, skip_special_tokens=False)

    return tally.marked(encoded.tokens, encoded.mask, decode)


@pytest.mark.parametrize("name", CASES)
def test_targets(name):
    template, record, expected = CASES[name]
    assert marked(template, "chat", record) == expected


def test_train_on():
    start = "<|start|>system\nS<|end|>\n<|start|>user\nQ1<|end|>\n<|start|>assistant\n"
    middle = "<|start|>user\nQ2<|end|>\n<|start|>assistant\n"
    record = {"messages": LONG[:5]}
    last = start + "A1<|end|>\n" + middle + "⟦A2<|end|>\n⟧"
    assert marked(chats.CHATML, "chat", record, train_on="last_assistant") == last
    assert marked(chats.CHATML, "chat", record, train_on="completion") == last
    # The first token of a row has nothing before it that could predict it.
    everything = start[len("<|start|>") :] + "A1<|end|>\n" + middle + "A2<|end|>\n"
    found = marked(chats.CHATML, "chat", record, train_on="all")
    assert found == f"<|start|>⟦{everything}⟧"


def test_chat_that_ends_in_a_question_has_no_completion():
    record = {"messages": LONG}
    assert "⟦" not in marked(chats.CHATML, "chat", record, train_on="completion")
    last = marked(chats.CHATML, "chat", record, train_on="last_assistant")
    assert last.count("⟦") == 1
    assert "⟦A2<|end|>\n⟧" in last


def test_completion_is_a_chat():
    record = {"prompt": "Q1", "completion": "A1", "system": "S"}
    found = marked(chats.CHATML, "completion", record)
    question = "<|start|>system\nS<|end|>\n<|start|>user\nQ1<|end|>\n"
    assert found == question + "<|start|>assistant\n⟦A1<|end|>\n⟧"


def test_system_text_merged_into_the_question():
    found = marked(chats.STRICT, "chat", {"messages": LONG[:3]}, system_role="merge")
    assert found == "<s>[Q]S\n\nQ1[/Q]⟦A1<|end|>⟧"


@pytest.mark.parametrize(
    ("template", "end_token", "expected"),
    [
        (chats.CHATML, "always", "⟦A1<|end|>\n⟧"),
        (
            chats.CHATML.replace("{{ m['content'] }}<|end|>\n", "{{ m['content'] }}\n"),
            "auto",
            "⟦A1\n⟧",
        ),
        (
            chats.CHATML.replace("{{ m['content'] }}<|end|>\n", "{{ m['content'] }}\n"),
            "always",
            "⟦A1\n<|end|>⟧",
        ),
    ],
)
def test_end_token_of_chats(template, end_token, expected):
    found = marked(template, "chat", {"messages": TWO}, end_token=end_token)
    assert found.endswith("<|start|>assistant\n" + expected)


TURN = chats.HEAD + "{{ m['content'] }}<|end|>\n"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
LAST_TWO = "{% for m in messages[-2:] %}" + TURN + "{% endfor %}" + PROMPT
SAME = [turn("user", "Q"), turn("assistant", "A")]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        # The question is the start of the answer, and its prompt so the start of the text.
        (
            "<s>{{ messages[-1]['content'] }}",
            [*TWO, turn("user", "A"), turn("assistant", "A2")],
            "<s>⟦A2⟧",
        ),
        ("{% set m = messages[-1] %}" + TURN + PROMPT, TWO, "<|start|>assistant\n⟦A1<|end|>\n⟧"),
        # Equal turns: the first answer's prompt is the start of the text, which shows the second.
        (
            LAST_TWO,
            [*SAME, *SAME],
            "<|start|>user\nQ<|end|>\n<|start|>assistant\n⟦A<|end|>\n⟧",
        ),
        (
            LAST_TWO.replace("-2:", "-3:"),
            [*TWO, turn("user", "Q2"), turn("assistant", "A2")],
            "<|start|>assistant\n⟦A1<|end|>\n⟧<|start|>user\nQ2<|end|>\n"
            "<|start|>assistant\n⟦A2<|end|>\n⟧",
        ),
    ],
    ids=["last message's words", "last message", "last two, all equal", "last three"],
)
def test_a_template_that_drops_turns_has_the_answers_that_appear_as_targets(
    template, messages, expected
):
    assert marked(template, "chat", {"messages": messages}, end_token="never") == expected


@pytest.mark.parametrize(
    ("end_token", "text", "expected"),
    [
        ("auto", "ab", "a⟦b<|end|>⟧"),
        ("always", "ab", "a⟦b<|end|>⟧"),
        ("never", "ab", "a⟦b⟧"),
        ("auto", "ab<|end|>", "a⟦b<|end|>⟧"),
    ],
)
def test_end_token_of_texts(end_token, text, expected):
    assert marked(chats.CHATML, "text", {"text": text}, end_token=end_token) == expected
