"""Rendering equals transformers' own, and what a template can do is found out."""

import datetime

import pytest

from stages.core.errors import UserError
from stages.tokenize.rows import plain
from stages.tokenize.template import Refused, common_prefix, load_template
from tests.tokenize import chats
from tests.tokenize.chats import call, turn

CHAT = [
    turn("user", "Q1"),
    turn("assistant", "", tool_calls=[call("f", {"x": "<ü>"})]),
    turn("tool", "R"),
    turn("assistant", "A1"),
]
TOOL = [{"type": "function", "function": {"name": "f", "description": "d<ü>"}}]


@pytest.mark.parametrize("name", ["chatml", "default system", "trim", "think prompt", "tools"])
@pytest.mark.parametrize("prompt", [False, True])
def test_rendering_is_that_of_transformers(name, prompt):
    tokenizer = chats.tokenizer(chats.ALL[name])
    template = load_template(tokenizer)
    for messages, tools in ((CHAT[:1], None), (CHAT, TOOL)):
        expected = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        assert template.render(messages, tools, prompt) == expected


def test_reasoning_is_that_of_transformers():
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}"
    tokenizer = chats.tokenizer(source)
    messages = [turn("assistant", "A", reasoning_content="R")]
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    template = load_template(tokenizer)
    assert template.render([plain(message, "") for message in messages]) == expected == "R|R"
    assert not load_template(chats.tokenizer(chats.CHATML)).reasoning
    assert load_template(chats.tokenizer(chats.REASONING)).reasoning


def test_a_tokenizer_with_two_templates():
    tokenizer = chats.tokenizer({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    template = load_template(tokenizer)
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, TOOL) == "1 tools"


def test_today_is_always_the_same_day():
    template = load_template(chats.tokenizer("{{ strftime_now('%d %b %Y') }}"))
    assert template.render(CHAT) == datetime.date(2024, 7, 26).strftime("%d %b %Y")
    assert template.writes_date


def test_thinking_is_enabled_as_mlx_lm_does():
    """mlx-lm passes whether the vocabulary has think tokens."""
    source = "{{ 'on' if enable_thinking else 'off' }}"
    assert load_template(chats.tokenizer(source)).render(CHAT) == "on"
    without = chats.tokenizer(source, added_tokens=[])
    assert load_template(without).render(CHAT) == "off"


@pytest.mark.parametrize(
    ("template", "system", "tools", "arguments", "tool_role"),
    [
        (chats.CHATML, True, False, "", True),
        (chats.STRICT, False, False, "", False),
        (chats.TOOLS, True, True, "object", True),
        (chats.TOOLS_STRING, True, True, "string", True),
        (chats.TOOL_IDS, True, True, "object", True),
    ],
)
def test_what_a_template_can_do(template, system, tools, arguments, tool_role):
    found = load_template(chats.tokenizer(template))
    assert found.system_role is system
    assert found.tools is tools
    assert found.call_arguments == arguments
    assert found.tool_role is tool_role


def test_a_template_that_drops_the_system_turn_in_silence_has_no_system_role():
    dropping = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    assert not load_template(chats.tokenizer(dropping)).system_role


def test_parts_around_turns():
    template = load_template(chats.tokenizer(chats.DEFAULT_SYSTEM))
    assert template.generation_prompt == "<|start|>assistant\n"
    assert template.answer_footer == "<|end|>\n"
    assert template.user_header == "<|start|>user\n"
    assert template.default_system == "<|start|>system\nBe kind.<|end|>\n"
    assert load_template(chats.tokenizer(chats.STRICT)).default_system == ""


def test_refusals_carry_the_words_of_the_template():
    template = load_template(chats.tokenizer(chats.STRICT))
    with pytest.raises(Refused, match="Roles must alternate"):
        template.render([turn("user", "a"), turn("user", "b")])


def test_shared_counts_whole_tokens():
    template = load_template(chats.tokenizer(chats.CHATML))
    assert template.shared("<think>\nx", "<think>\n") == (8, True)
    assert template.shared("<|end|>\n<|start|>", "<|end|>\n<|close|>") == (8, False)
    assert template.shared("<b>", "<think>") == (0, False)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("abc", "abcd", 3), ("xbc", "abc", 0)],
)
def test_common_prefix(left, right, expected):
    assert common_prefix(left, right) == expected


def test_a_template_that_is_no_jinja_is_said_with_its_line():
    tokenizer = chats.tokenizer("{% for m in messages %}\n{{ m['content' }}\n{% endfor %}")
    with pytest.raises(UserError, match="The chat template cannot be used") as caught:
        load_template(tokenizer, "mine.jinja")
    assert caught.value.status == 2
    assert caught.value.where == "mine.jinja, line 2"
    assert "'}'" in caught.value.found
    assert caught.value.fix == "mend line 2 of mine.jinja"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ 10.0 ** 400 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_whose_sums_fail_refuses_the_chat(source):
    template = load_template(chats.tokenizer(source))
    with pytest.raises(Refused):
        template.render(CHAT)


TURNS = "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
LOOP = "{% for m in messages %}" + TURNS + "{% endfor %}"


@pytest.mark.parametrize(
    ("source", "disorder", "left_out"),
    [
        (LOOP, "", []),
        (LOOP.replace("m['content']", "m['content'] | upper"), "", []),
        (LOOP.replace("in messages", "in messages | reverse"), "another order", []),
        (LOOP.replace("<|end|>", "{{ range(10**5) | random }}"), "two different texts", []),
        (
            "{{ messages[-1]['content'] }}",
            "",
            ["first question", "first answer", "last question"],
        ),
        (
            LOOP.replace(TURNS, "{% if m.role == 'user' or loop.last %}" + TURNS + "{% endif %}"),
            "",
            ["first answer"],
        ),
        ("{{ raise_exception('no chats') }}", "", []),
    ],
    ids=["whole", "upper", "reversed", "random", "last only", "hides answers", "refuses"],
)
def test_what_a_template_makes_of_a_plain_chat(source, disorder, left_out):
    template = load_template(chats.tokenizer(source))
    assert disorder in template.disorder and bool(disorder) == bool(template.disorder)
    if not disorder:
        assert template.left_out == left_out


def test_no_chat_is_masked_by_a_template_that_shuffles_it():
    from stages.core.config.schema import Tokenize
    from stages.tokenize.work import refuse_forms

    template = load_template(chats.tokenizer(LOOP.replace("in messages", "in messages | reverse")))
    with pytest.raises(UserError, match="cannot be trained on") as caught:
        refuse_forms({"text": 0, "chat": 1, "completion": 0}, template, Tokenize())
    assert all(caught.value.record().values())
    refuse_forms({"text": 1, "chat": 0, "completion": 0}, template, Tokenize())
