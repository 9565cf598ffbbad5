"""The fast way to a layout equals the slow one, for whatever the words are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.tokenize import layout
from stages.tokenize.shapes import Shapes, learn
from stages.tokenize.template import Refused, load_template
from tests.tokenize import chats
from tests.tokenize.chats import turn

TEMPLATES = {name: load_template(chats.tokenizer(text)) for name, text in chats.ALL.items()}
SHAPES = {name: Shapes(template) for name, template in TEMPLATES.items()}

WORDS = st.text(max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "\n",
        "<think>",
        "<think>\n",
        "a</think>b",
        "<think>\nx\n</think>\n\ny",
        "<|end|>",
        "<t",
    ]
)
ROLES = st.lists(st.sampled_from(["user", "assistant", "user", "assistant", "system"]), min_size=1)


@pytest.mark.parametrize("name", chats.ALL)
@settings(max_examples=30, deadline=None)
@given(roles=ROLES.filter(lambda roles: len(roles) <= 6), data=st.data())
def test_fast_equals_slow(name, roles, data):
    messages = [turn(role, data.draw(WORDS)) for role in roles]
    try:
        slow = layout.find(TEMPLATES[name], messages)
    except Refused:
        with pytest.raises(Refused):
            SHAPES[name].layout(messages)
        return
    assert SHAPES[name].layout(messages) == slow


@pytest.mark.parametrize("name", chats.ALL)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_answers_hold_their_words_and_nothing_of_a_question(name, data):
    """Each answer's span has its own words; no span has those of another turn."""
    marks = [f"«{i}»" for i in range(5)]
    roles = ["user", "assistant", "user", "assistant", "user"]
    extra = [data.draw(st.sampled_from(["", " ", "x", "<", "<t", "\n"])) for _ in roles]
    words = [f"{mark}{more}{mark}" for mark, more in zip(marks, extra, strict=True)]
    messages = [turn(role, text) for role, text in zip(roles, words, strict=True)]
    found = SHAPES[name].layout(messages)
    spans = [found.text[start[0] : end[0]] for start, end in found.answers]
    for own, span in zip((1, 3), spans, strict=True):
        assert [mark for mark in marks if mark in span] == [marks[own]]
        assert span.count(marks[own]) == 2


def test_every_template_has_a_fast_way():
    for name, template in TEMPLATES.items():
        assert learn(template, ["user", "assistant", "user", "assistant"]) is not None, name


def test_a_template_that_hides_a_turn_has_none():
    hiding = (
        "{% for m in messages %}{% if not loop.first %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    template = load_template(chats.tokenizer(hiding))
    assert learn(template, ["user", "assistant"]) is None
