"""Windows lose no target and double none, for any lengths, cap, overlap and mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.split.pieces import POLICIES, Piece, Row

NONE = np.zeros(0, np.int32)


def text(length):
    return Row(length, np.arange(1, length), NONE, 0)


def chat(length, answers, starts=(), system_end=0):
    targets = np.concatenate([np.arange(*answer) for answer in answers])
    return Row(length, targets, np.array(starts, np.int32), system_end)


@st.composite
def rows(draw):
    length = draw(st.integers(2, 80))
    targets = draw(st.sets(st.integers(1, length - 1)) | st.just(set(range(1, length))))
    starts = draw(st.sets(st.integers(1, length - 1), max_size=5))
    system_end = draw(st.integers(0, length))
    cap = draw(st.integers(2, length + 5))
    overlap = draw(st.integers(0, max(0, cap - 2)))
    row = Row(
        length,
        np.array(sorted(targets), np.int64),
        np.array(sorted(starts), np.int32),
        system_end,
    )
    return row, cap, overlap


def trained(row, piece):
    """Positions in the row that the piece trains: what its mask says, minus its first token."""
    tokens = [*range(piece.prefix), *range(piece.start, piece.stop)]
    inside = [at for at in tokens[1:] if at in set(row.targets.tolist()) and at >= piece.first]
    assert not (tokens[0] in row.targets and tokens[0] >= piece.first), "nothing predicts it"
    return tokens, inside


@settings(max_examples=600, deadline=None)
@given(rows())
def test_split_trains_every_target_once(case):
    row, cap, overlap = case
    seen = []
    for piece in POLICIES["split"](row, cap, overlap):
        tokens, inside = trained(row, piece)
        assert len(tokens) <= cap
        assert tokens == sorted(set(tokens)), "in order, none twice"
        assert tokens[-1] < row.length
        assert inside, "every example has a target"
        seen += inside
    assert seen == row.targets.tolist()


@settings(max_examples=250, deadline=None)
@given(rows(), st.sampled_from(["truncate_end", "truncate_start", "keep_completion", "drop"]))
def test_other_policies_keep_one_piece_at_most(case, policy):
    row, cap, overlap = case
    if row.length <= cap:
        return
    pieces = POLICIES[policy](row, cap, overlap)
    assert len(pieces) <= 1
    for piece in pieces:
        tokens, inside = trained(row, piece)
        assert len(tokens) <= cap
        assert tokens[-1] < row.length
        assert inside


@pytest.mark.parametrize("overlap", [0, 1, 7])
@pytest.mark.parametrize("length", [65, 127, 128, 400])
def test_pieces_of_a_text(length, overlap):
    """cap - 1 new tokens a piece; one token, or the overlap, is the context of a later piece."""
    cap = 64
    pieces = POLICIES["split"](text(length), cap, overlap)
    context = max(1, overlap)
    starts, at = [0], cap
    while at < length:
        starts.append(at - context)
        at = starts[-1] + cap
    assert [piece.start for piece in pieces] == starts
    assert pieces[-1].stop == length
    if overlap == 0:
        assert len(pieces) == -(-(length - 1) // (cap - 1))
    assert {token for piece in pieces for token in range(piece.start, piece.stop)} == set(
        range(length)
    )


def test_a_chat_is_cut_where_questions_begin():
    """Three exchanges of 60 tokens after a system prompt of 10, windows of 140."""
    row = chat(190, [(40, 70), (100, 130), (160, 190)], starts=(70, 130), system_end=10)
    assert POLICIES["split"](row, 140, 0) == [Piece(0, 0, 130, 40), Piece(10, 130, 190, 160)]
    assert POLICIES["split"](row, 80, 0) == [
        Piece(0, 0, 70, 40),
        Piece(10, 70, 130, 100),
        Piece(10, 130, 190, 160),
    ]
    # The overlap is context before the question too.
    assert POLICIES["split"](row, 140, 8)[1] == Piece(10, 122, 190, 160)


def test_a_long_system_prompt_is_not_repeated():
    row = chat(190, [(60, 90), (160, 190)], starts=(90,), system_end=50)
    assert POLICIES["split"](row, 98, 0) == [Piece(0, 0, 90, 60), Piece(0, 92, 190, 160)]


def test_an_answer_behind_a_long_prompt_keeps_what_fits_before_it():
    assert POLICIES["split"](chat(500, [(480, 500)]), 64, 0) == [Piece(0, 436, 500, 480)]
    # The answer alone is longer than the window: half of the first window is prompt.
    pieces = POLICIES["split"](chat(600, [(500, 600)]), 64, 0)
    assert pieces[0] == Piece(0, 468, 532, 500)
    assert pieces[1] == Piece(0, 531, 595, 532)


def test_what_follows_the_last_target_is_no_piece():
    row = chat(300, [(10, 20)])
    assert POLICIES["split"](row, 64, 0) == [Piece(0, 0, 20, 10)]


@pytest.mark.parametrize(
    ("policy", "row", "expected"),
    [
        ("truncate_end", text(100), [Piece(0, 0, 64, 1)]),
        ("truncate_start", text(100), [Piece(0, 36, 100, 37)]),
        ("keep_completion", text(100), [Piece(0, 0, 64, 1)]),
        ("drop", text(100), []),
        # An answer of 20 after a prompt of 80: its tail stays, or it is lost, or kept whole.
        ("truncate_end", chat(100, [(80, 100)]), []),
        ("truncate_start", chat(100, [(80, 100)]), [Piece(0, 36, 100, 80)]),
        ("keep_completion", chat(100, [(80, 100)]), [Piece(0, 36, 100, 80)]),
        # The last answer of two, with a question behind it.
        ("keep_completion", chat(100, [(5, 10), (50, 90)]), [Piece(0, 26, 90, 50)]),
        # An answer longer than the window: its beginning, after one token of context.
        ("keep_completion", chat(200, [(20, 200)]), [Piece(0, 19, 83, 20)]),
    ],
)
def test_policies(policy, row, expected):
    assert POLICIES[policy](row, 64, 0) == expected
