import numpy as np
import pytest

from stages.core.tables import Examples
from stages.evaluate.records import Record, shortened
from stages.evaluate.samples import choose, prompt_length


def bits(text):
    return np.array([c == "T" for c in text])


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        ("..TTT", 2),
        ("..TT..TTT", 6),  # the last answer of a chat
        ("..TTT..", 2),  # a footer after the answer is no prompt
        (".TTTTT", 3),  # a first token is never a target: this is a text, cut in half
        ("..TT.T", 5),
    ],
)
def test_prompt_is_what_stands_before_the_last_run_of_targets(mask, length):
    assert prompt_of(mask) == length


def prompt_of(mask, rendered=()):
    return prompt_length(np.arange(100, 100 + len(mask)), bits(mask), rendered)


def test_where_all_is_target_the_rendered_prompt_says_where_the_answer_begins():
    assert prompt_of("TTTTTT", rendered=[100, 101, 102]) == 3


def test_a_rendered_prompt_counts_as_far_as_the_example_starts_with_it():
    assert prompt_of("TTTTTT", rendered=[100, 101, 999, 103]) == 2


def test_a_prompt_never_takes_the_whole_example():
    assert prompt_of("TTT", rendered=[100, 101, 102, 103]) == 2


def test_a_text_is_cut_in_half_but_not_beyond_64_tokens():
    assert [prompt_of("T" * n) for n in (2, 3, 100, 1000)] == [1, 1, 50, 64]


def test_whole_rows_come_first_then_pieces_then_leaked_rows():
    """Row 0 leaked, row 1 in two pieces, rows 2 to 4 whole, row 5 without a target."""
    row = np.array([0, 1, 1, 2, 3, 4, 5])
    lengths = np.full(7, 3)
    mask = np.tile([False, True, True], 7)
    mask[-3:] = False
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    piece = np.array([0, 0, 1, 0, 0, 0, 0], np.int32)
    examples = Examples(offsets, np.zeros(21, np.int32), mask, row, piece)
    chosen = choose(examples, 10, leaked={0})
    assert set(chosen[:3]) == {3, 4, 5}
    assert chosen[3:] == [1, 0]
    assert choose(examples, 2, leaked={0}) == chosen[:2]
    assert choose(examples, 0, leaked=set()) == []


def record(kind, **content):
    return Record(0, "a", 1, kind, content)


def test_turns_and_answer_of_each_kind():
    text = record("text", text="words")
    assert (text.turns, text.answer) == ([], "words")
    completion = record("completion", prompt="p", completion="c", system="s")
    assert completion.turns == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "p"},
    ]
    assert completion.answer == "c"
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "left unanswered"},
    ]
    chat = record("chat", messages=messages)
    assert [turn["content"] for turn in chat.turns] == ["one", "two", "three"]
    assert chat.answer == "four"


def test_a_tool_call_is_shown_as_json():
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = record("chat", messages=[{"role": "user", "content": "q"}, turn])
    assert chat.answer == '{"name": "f", "arguments": {"a": "é"}}'


def test_shortened_keeps_both_ends():
    assert shortened("abc", 3) == "abc"
    assert shortened("0123456789", 9) == "012 … 789"
