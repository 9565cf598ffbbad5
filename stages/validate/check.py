"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

OK, WARNING, ERROR = "ok", "warning", "error"
MOST_LINES = 20


@dataclass(frozen=True)
class Check:
    """What was looked at.

    Attributes:
        name: Short and stable.
        level: `ok`, `warning` or `error`.
        message: One sentence; "" where all is well and there is nothing to say.
        found: What was there.
        expected: What should be there.
        fix: What to do.
    """

    name: str
    level: str = OK
    message: str = ""
    found: Any = ""
    expected: Any = ""
    fix: str = ""

    def record(self) -> dict[str, Any]:
        """The check as JSON-like values."""
        return asdict(self)

    def line(self) -> str:
        """The check as one line of text."""
        details = [("found", self.found), ("expected", self.expected), ("to do", self.fix)]
        parts = [f"{label}: {text}" for label, text in details if text != ""]
        return f"{self.name}: {self.message}" + (f" ({'; '.join(parts)})" if parts else "")


def places(rows: Sequence[dict[str, Any]]) -> str:
    """Where rows stand, as `a.jsonl lines 1, 4; b.jsonl line 2`, the first ones only."""
    by_source: dict[str, list[int]] = {}
    for row in rows[:MOST_LINES]:
        by_source.setdefault(str(row["source"]), []).append(int(row["line"]))
    texts = []
    for source, lines in by_source.items():
        numbers = np.unique(lines).tolist()
        word = "line" if len(numbers) == 1 else "lines"
        texts.append(f"{source} {word} {', '.join(map(str, numbers))}")
    return "; ".join(texts) + (" …" if len(rows) > MOST_LINES else "")
