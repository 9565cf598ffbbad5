"""The one exception for a row that cannot be used: a reason, and a column where there is one."""

from __future__ import annotations


class BadRow(Exception):
    """A row is refused.

    Args:
        reason: What is wrong, naming the key or turn.
        column: 1-based character in the line, for text that is no JSON; None elsewhere.
        line: 1-based line inside the row's own text (rows of a JSON array span several).
        unfinished: The text ended before the JSON value did.
    """

    def __init__(
        self, reason: str, column: int | None = None, line: int = 1, unfinished: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column
        self.line = line
        self.unfinished = unfinished
