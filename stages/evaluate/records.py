"""Rows of `data/raw/S.parquet` that are shown to a person: where they stand, and what they say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stages.core import tables

LONGEST_SHOWN = 1200
"""Characters of a turn that are kept for showing; the middle is left out."""


@dataclass(frozen=True)
class Record:
    """One row as collected.

    Attributes:
        row, source, line: Which it is and where it stands in the user's data.
        kind: `text`, `completion` or `chat`.
        content: `{"text"}`, `{"prompt", "completion", "system"?}` or `{"messages", "tools"?}`.
    """

    row: int
    source: str
    line: int
    kind: str
    content: dict[str, Any]

    @property
    def turns(self) -> list[dict[str, str]]:
        """What stands before the answer, as `{"role", "content"}`; none for text."""
        if self.kind == "completion":
            found = [("user", self.content["prompt"])]
            if self.content.get("system"):
                found.insert(0, ("system", self.content["system"]))
        elif self.kind == "chat":
            found = [(turn["role"], _words(turn)) for turn in self.content["messages"]]
            found = found[: _last_answer(self.content["messages"])]
        else:
            found = []
        return [{"role": role, "content": content} for role, content in found]

    @property
    def answer(self) -> str:
        """What the model should say: the completion, the last assistant turn, or the text."""
        if self.kind == "completion":
            return self.content["completion"]
        if self.kind == "chat":
            messages = self.content["messages"]
            return _words(messages[_last_answer(messages)])
        return self.content["text"]

    def origin(self) -> dict[str, Any]:
        """Row, source, line and kind, for JSON."""
        return {"row": self.row, "source": self.source, "line": self.line, "kind": self.kind}


def read(raw: Path, rows: Iterable[int]) -> dict[int, Record]:
    """The records of these rows, by row, in one pass over the file.

    Raises:
        UserError: The file is missing or is no Parquet file.
    """
    wanted = pa.array(sorted(set(rows)), pa.int64())
    found = {}
    for batch in tables.batches(raw):
        for entry in batch.filter(pc.is_in(batch["row"], value_set=wanted)).to_pylist():
            content = json.loads(entry.pop("record"))
            found[entry["row"]] = Record(**entry, content=content)
    return found


def standing_in(raw: Path, other: Path) -> set[int]:
    """Rows of `raw` whose record also stands in `other`, compared as text.

    Raises:
        UserError: A file is missing or is no Parquet file.
    """
    rows: dict[str, list[int]] = {}
    for batch in tables.batches(raw, ["row", "record"]):
        for row, record in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            rows.setdefault(record, []).append(row)
    found: set[int] = set()
    for batch in tables.batches(other, ["record"]):
        for record in batch["record"].to_pylist():
            found.update(rows.get(record, ()))
    return found


def shortened(text: str, most: int = LONGEST_SHOWN) -> str:
    """The text, its middle replaced by ` … ` where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def _last_answer(messages: list[dict[str, Any]]) -> int:
    """Index of the last assistant turn; the last turn where there is none."""
    answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    return answers[-1] if answers else len(messages) - 1


def _words(turn: dict[str, Any]) -> str:
    """A turn's text, and its tool calls as JSON below it."""
    calls = turn.get("tool_calls") or []
    parts = [turn.get("content") or ""]
    parts += [json.dumps(call.get("function", call), ensure_ascii=False) for call in calls]
    return "\n".join(part for part in parts if part)
