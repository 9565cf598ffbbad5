"""How a row longer than the cap becomes pieces, one pure function per `split.policy`.

`split`: windows. Each target is a target of exactly one piece, however long the row. A piece's
first token can't be a target, for nothing predicts it; so a later piece begins with at least one
token that an earlier one has trained already, its context (`overlap` tokens where that is more). A
window over a text thus trains cap - 1 new tokens, and without overlap a text of n tokens gives
ceil((n - 1) / (cap - 1)) pieces, whose tokens together are all n (8,840 at 2,048: 5 pieces).

* Where a question begins inside a window, the window ends before the last such: a chat's exchanges
  stay whole if they fit. The next piece begins with that question, after the system prompt once
  more (as context) if that takes no more than half of the window.
* A window without targets is no piece: nothing is trained there. A piece for targets behind a long
  stretch without any takes as much of that as context as leaves room for them: all that fits if
  they fit whole, else half a window.

The other policies keep one piece or none: `truncate_end` the first tokens, `truncate_start` the
last, `keep_completion` the last answer and what fits before it (or, where the answer alone is
too long, its beginning after one token of context), `drop` nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """A row of tokens, without the tokens.

    Attributes:
        length: How many there are.
        targets: int64, ascending: indices of targets; index 0 is never one.
        starts: int32, ascending: where later questions of a chat begin.
        system_end: Tokens of the system prompt.
    """

    length: int
    targets: np.ndarray
    starts: np.ndarray
    system_end: int


class Piece(NamedTuple):
    """Tokens `[0, prefix)` and `[start, stop)` of a row; targets before `first` are context.

    `prefix` is at most `start`.
    """

    prefix: int
    start: int
    stop: int
    first: int


Policy = Callable[[Row, int, int], list[Piece]]
"""(row longer than the cap, cap, overlap) → its pieces; each has a target."""


def split(row: Row, cap: int, overlap: int) -> list[Piece]:
    """Windows that train every target once."""
    return list(_Windows(row, cap, overlap).pieces())


class _Windows:
    """The windows over one row."""

    def __init__(self, row: Row, cap: int, overlap: int) -> None:
        self.row, self.cap, self.overlap = row, cap, overlap
        self.end = int(row.targets[-1]) + 1 if len(row.targets) else 0

    def pieces(self) -> Iterator[Piece]:
        stop, trained = 0, 0
        while trained < len(self.row.targets):
            first = int(self.row.targets[trained])
            prefix, start = self._begin(first, stop)
            stop = self._stop(first, start + self.cap - prefix)
            yield Piece(prefix, start, stop, first)
            trained = int(np.searchsorted(self.row.targets, stop))

    def _begin(self, first: int, stop: int) -> tuple[int, int]:
        """Prefix and start of the piece for targets from `first` on; the last ended at `stop`."""
        for question in self._questions(stop, first):
            prefix, start = self._at_question(question, first)
            if self._has_room(prefix, start, first):
                return prefix, start
        context = max(1, self.overlap)
        if first == stop:
            return 0, first - context
        low = max(0, stop - self.overlap)
        whole = self.end - first + context <= self.cap
        start = self.end - self.cap if whole else first - max(context, self.cap // 2)
        return 0, min(max(low, start), first - 1)

    def _questions(self, least: int, most: int) -> list[int]:
        """Where questions begin in `[least, most]`; a row's first one begins at 0."""
        starts = self.row.starts
        inside = starts[np.searchsorted(starts, least) : np.searchsorted(starts, most, "right")]
        return ([0] if least == 0 else []) + inside.tolist()

    def _at_question(self, question: int, first: int) -> tuple[int, int]:
        start = max(0, question - self.overlap)
        if 0 < self.row.system_end <= min(start, self.cap // 2):
            return self.row.system_end, start
        return 0, min(start, first - 1)

    def _has_room(self, prefix: int, start: int, first: int) -> bool:
        """Whether a piece has room for its exchange whole, or half of it for targets."""
        room = self.cap - prefix
        later = self.row.starts[np.searchsorted(self.row.starts, first, "right") :]
        exchange_end = int(later[0]) if len(later) else self.end
        return first - start <= room // 2 or min(exchange_end, self.end) - start <= room

    def _stop(self, first: int, most: int) -> int:
        """Where a piece ends: before the last question inside it, or at its full width."""
        if most >= self.end:
            return self.end
        inside = self._questions(first + 1, most)
        return inside[-1] if inside else most


def truncate_end(row: Row, cap: int, overlap: int) -> list[Piece]:
    """The first tokens."""
    return _one(row, 0, cap)


def truncate_start(row: Row, cap: int, overlap: int) -> list[Piece]:
    """The last tokens."""
    return _one(row, row.length - cap, row.length)


def keep_completion(row: Row, cap: int, overlap: int) -> list[Piece]:
    """The last answer whole, with what fits before it; its beginning where it is too long."""
    if not len(row.targets):
        return []
    gaps = np.flatnonzero(np.diff(row.targets) > 1)
    first = int(row.targets[gaps[-1] + 1 if len(gaps) else 0])
    end = int(row.targets[-1]) + 1
    if end - first < cap:
        return _one(row, max(0, end - cap), max(end, cap))
    return _one(row, first - 1, first - 1 + cap)


def drop(row: Row, cap: int, overlap: int) -> list[Piece]:
    """Nothing."""
    return []


def _one(row: Row, start: int, stop: int) -> list[Piece]:
    """One piece, if it has a target."""
    at = int(np.searchsorted(row.targets, start + 1))
    if at == len(row.targets) or row.targets[at] >= stop:
        return []
    return [Piece(0, start, stop, int(row.targets[at]))]


POLICIES: dict[str, Policy] = {
    "split": split,
    "truncate_end": truncate_end,
    "truncate_start": truncate_start,
    "keep_completion": keep_completion,
    "drop": drop,
    "error": drop,
}
