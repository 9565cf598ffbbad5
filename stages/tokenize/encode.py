"""Rendered rows to token ids and target masks, a chunk of rows at a time.

Borders are found in token space without the tokenizer's offsets: a byte-level token stands for a
known number of bytes, so one running sum over a chunk says where every token begins and ends.
Rows where the sum does not come out (a normalizer changed the text, a token swallowed white space)
and tokenizers of other kinds go by the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from stages.tokenize.answers import Border
from stages.tokenize.rows import Rendered
from stages.tokenize.vocabulary import Vocabulary

START, END, TURN, SYSTEM = range(4)
MOST_BLANKS = 4
"""Blank tokens looked past for the end token of a row (`<|im_end|>` and a line break)."""


class Encoded(NamedTuple):
    """A chunk of N rows, T tokens in all.

    Attributes:
        offsets: int64 (N + 1,): tokens of row i are `tokens[offsets[i]:offsets[i + 1]]`.
        tokens: int32 (T,).
        mask: bool (T,): which are targets; the first of a row never is.
        targets: int64 (N,): targets of each row.
        turn_offsets: int64 (N + 1,): into `turns`.
        turns: int32: token index, within its row, of each later question's start.
        system_end: int32 (N,): tokens of the system prompt.
        end: int32 (N,): index, within its row, of the end token where that is a target and only
            blank tokens follow; else -1.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    targets: np.ndarray
    turn_offsets: np.ndarray
    turns: np.ndarray
    system_end: np.ndarray
    end: np.ndarray


def encode_texts(vocabulary: Vocabulary, texts: Sequence[str]) -> list[Encoding]:
    """Encode strings on all cores; with offsets only where they are always needed."""
    if vocabulary.bytes_of is None:
        return vocabulary.backend.encode_batch(texts, add_special_tokens=False)
    return vocabulary.backend.encode_batch_fast(texts, add_special_tokens=False)


def assemble(
    vocabulary: Vocabulary,
    rows: Sequence[Rendered],
    encodings: Sequence[Encoding],
    end_token: str,
) -> Encoded:
    """Put ids, end tokens and masks of a chunk together.

    Args:
        vocabulary: The tokenizer's facts.
        rows: The rows, as rendered.
        encodings: Their texts, as encoded.
        end_token: `tokenize.end_token`.
    """
    ids = [encoding.ids for encoding in encodings]
    for i, row in enumerate(rows):
        if not row.ends_itself:
            ids[i] = _text_ids(vocabulary, ids[i], end_token)
    offsets, tokens = _flat(ids)
    borders = _Borders(rows)
    index = _token_index(vocabulary, rows, encodings, borders, (offsets, tokens))
    closed = []
    if end_token == "always":
        closed = [i for i, row in enumerate(rows) if _is_open(vocabulary, row, ids[i])]
        for i in closed:
            ids[i] = [*ids[i], vocabulary.end]
        offsets, tokens = _flat(ids)
    mask = _mask(rows, offsets, borders, index)
    mask[offsets[1:][closed] - 1] = True
    system_end = np.zeros(len(rows), np.int32)
    system_end[borders.row[borders.kind == SYSTEM]] = index[borders.kind == SYSTEM]
    return Encoded(
        offsets=offsets,
        tokens=tokens,
        mask=mask,
        targets=_sums(mask, offsets),
        turn_offsets=_offsets([len(row.turns) for row in rows]),
        turns=index[borders.kind == TURN].astype(np.int32),
        system_end=system_end,
        end=_end(vocabulary, offsets, tokens, mask),
    )


def _text_ids(vocabulary: Vocabulary, ids: list[int], end_token: str) -> list[int]:
    """A text with the tokenizer's start and end, each unless it is there."""
    if ids[: len(vocabulary.start)] != vocabulary.start:
        ids = vocabulary.start + ids
    ended = end_token == "never" or vocabulary.end is None or ids[-1:] == [vocabulary.end]
    return ids if ended else [*ids, vocabulary.end]


def _is_open(vocabulary: Vocabulary, row: Rendered, ids: list[int]) -> bool:
    """Whether a chat's last text is trained and has no end token."""
    if vocabulary.end is None or not row.ends_itself:
        return False
    trained = row.spans is None or (bool(row.spans) and row.spans[-1][1][0] == len(row.text))
    last = next((id_ for id_ in reversed(ids) if not vocabulary.blank[id_]), None)
    return trained and (last is None or not vocabulary.ends[last])


class _Borders:
    """The borders of a chunk as flat arrays, in the order of the rows.

    Attributes:
        row: int64: which row.
        at: int64: position in the row's text, in UTF-8 bytes.
        whole: bool: see stages.tokenize.answers.
        kind: int8: START, END, TURN or SYSTEM.
    """

    def __init__(self, rows: Sequence[Rendered]) -> None:
        counts, at, whole, kind = [], [], [], []
        for row in rows:
            borders = list(_borders(row))
            positions = [border[0] for border, _ in borders]
            counts.append(len(borders))
            at += positions if row.text.isascii() else _in_bytes(row.text, positions)
            whole += [border[1] for border, _ in borders]
            kind += [which for _, which in borders]
        self.row = np.repeat(np.arange(len(rows)), counts)
        self.at = np.array(at, np.int64)
        self.whole = np.array(whole, bool)
        self.kind = np.array(kind, np.int8)


def _borders(row: Rendered) -> Iterator[tuple[Border, int]]:
    for start, end in row.spans or ():
        yield start, START
        yield end, END
    for turn in row.turns:
        yield (turn, True), TURN
    if row.system_end:
        yield (row.system_end, True), SYSTEM


def _in_bytes(text: str, positions: Sequence[int]) -> list[int]:
    """Character positions as positions in the UTF-8 bytes."""
    result = {}
    last = total = 0
    for position in sorted(set(positions)):
        total += len(text[last:position].encode())
        result[position] = total
        last = position
    return [result[position] for position in positions]


def _token_index(
    vocabulary: Vocabulary,
    rows: Sequence[Rendered],
    encodings: Sequence[Encoding],
    borders: _Borders,
    flat: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """For each border the index, within its row, of the first token after it: int64.

    Only chats have borders, and their tokens here are those of their text alone.
    """
    if not len(borders.at):
        return np.zeros(0, np.int64)
    offsets, tokens = flat
    exact = np.zeros(len(rows), bool)
    index = np.zeros(len(borders.at), np.int64)
    if vocabulary.bytes_of is not None:
        ends = np.cumsum(vocabulary.bytes_of[tokens], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        base = np.concatenate([[0], ends])[offsets]
        sizes = [len(row.text) if row.text.isascii() else len(row.text.encode()) for row in rows]
        exact = np.diff(base) == sizes
        place = base[borders.row] + borders.at
        index = _first_after(starts, ends, place, borders.whole)
        index = np.clip(index, offsets[borders.row], offsets[borders.row + 1])
        index -= offsets[borders.row]
    for i in np.unique(borders.row[~exact[borders.row]]):
        index[borders.row == i] = _by_offsets(vocabulary, rows[i], encodings[i])
    return index


def _first_after(
    starts: np.ndarray, ends: np.ndarray, place: np.ndarray, whole: np.ndarray
) -> np.ndarray:
    """The first token that starts at a border or after; where not whole, that ends after it."""
    return np.where(
        whole, np.searchsorted(starts, place, "left"), np.searchsorted(ends, place, "right")
    )


def _by_offsets(vocabulary: Vocabulary, row: Rendered, encoding: Encoding) -> np.ndarray:
    """The same for one row, by the tokenizer's own offsets (in characters)."""
    byte_level = vocabulary.bytes_of is not None
    if byte_level:
        encoding = vocabulary.backend.encode(row.text, add_special_tokens=False)
    spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, ends = np.maximum.accumulate(spans, axis=0).T
    if byte_level:  # their offsets may leave out the white space a token begins with
        starts[1:] = np.minimum(starts[1:], ends[:-1])
    borders = [border for border, _ in _borders(row)]
    place = np.array([at for at, _ in borders], np.int64)
    return _first_after(starts, ends, place, np.array([whole for _, whole in borders]))


def _mask(
    rows: Sequence[Rendered], offsets: np.ndarray, borders: _Borders, index: np.ndarray
) -> np.ndarray:
    """Targets: from every answer's start to its end, or everything; never a row's first token."""
    edges = np.zeros(offsets[-1] + 1, np.int32)
    at = offsets[borders.row] + index
    np.add.at(edges, at[borders.kind == START], 1)
    np.add.at(edges, at[borders.kind == END], -1)
    everything = np.array([row.spans is None for row in rows], bool)
    np.add.at(edges, offsets[:-1][everything], 1)
    np.add.at(edges, offsets[1:][everything], -1)
    mask = np.cumsum(edges[:-1]) > 0
    mask[offsets[:-1][np.diff(offsets) > 0]] = False
    return mask


def _end(
    vocabulary: Vocabulary, offsets: np.ndarray, tokens: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Index of each row's end token where it is a target, else -1: int32 (N,)."""
    if not len(tokens):
        return np.full(len(offsets) - 1, -1, np.int32)
    first, last = offsets[:-1], offsets[1:] - 1
    for _ in range(MOST_BLANKS):
        inside = last > first
        last = last - (inside & vocabulary.blank[tokens[np.maximum(last, 0)]])
    found = (last >= first) & vocabulary.ends[tokens[np.maximum(last, 0)]]
    found &= mask[np.maximum(last, 0)]
    return np.where(found, last - first, -1).astype(np.int32)


def _flat(ids: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int64 (N + 1,) and all ids end to end, int32."""
    offsets = _offsets([len(row) for row in ids])
    return offsets, np.fromiter(chain.from_iterable(ids), np.int32, offsets[-1])


def _offsets(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _sums(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    totals = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return np.diff(totals[offsets])
