"""The errors a person can mend: what is wrong, what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """The user's input or settings are wrong. Ends a command with status 2 and no traceback.

    Args:
        what: One sentence that names the problem.
        where: File, line, key or row it was seen at, or "" where none applies.
        found: What was there.
        expected: What should be there.
        fix: What to do, as a line that can be followed (a command, a key to set).
    """

    status = 2

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        found: object = None,
        expected: object = None,
        fix: str = "",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.found = "" if found is None else str(found)
        self.expected = "" if expected is None else str(expected)
        self.fix = fix

    def lines(self) -> list[str]:
        """The message as lines of text, empty parts left out."""
        parts = [
            ("", self.what),
            ("  where:    ", self.where),
            ("  found:    ", self.found),
            ("  expected: ", self.expected),
            ("  to do:    ", self.fix),
        ]
        return [label + text for label, text in parts if text]

    def record(self) -> dict[str, str]:
        """The message as a flat dictionary, for `.cache/last_error.json`."""
        return {
            "what": self.what,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "fix": self.fix,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


class RunFailed(UserError):
    """A run ended badly in a way that is understood: status 1, the same plain message."""

    status = 1


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message: the first `most`, and how many more there are."""
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
