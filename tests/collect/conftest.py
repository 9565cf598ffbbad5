"""A workspace to collect in, and what came out of it as plain Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stages.collect.collect import collect
from stages.core.config.schema import Data, Shares

SPLITS = ("train", "valid", "test")


@dataclass
class Collected:
    """The report, and per split the rows with their records parsed."""

    report: dict[str, Any]
    tables: dict[str, list[dict[str, Any]]]

    def records(self, split="train"):
        return [row["record"] for row in self.tables[split]]

    def lines(self, split="train"):
        return [row["line"] for row in self.tables[split]]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """An empty folder that is the current one and its own DVC root."""
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(workspace):
    """Collect a path; every row stays in train unless shares are given."""
    count = 0

    def _run(path: Path | str | None, **settings: Any) -> Collected:
        nonlocal count
        count += 1
        folder = workspace / f"raw{count}"
        folder.mkdir()
        settings.setdefault("shares", Shares(train=1, valid=0, test=0))
        report = collect(Data(path=None if path is None else str(path), **settings), folder)
        tables = {s: pq.read_table(folder / f"{s}.parquet").to_pylist() for s in SPLITS}
        for table in tables.values():
            for row in table:
                row["record"] = json.loads(row["record"])
        return Collected(report, tables)

    return _run


@pytest.fixture
def write(workspace):
    """Write bytes, text or rows (JSONL) below data/source and give the path from the root."""

    def _write(name: str, content: bytes | str | list[Any]) -> str:
        path = workspace / "data/source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in content)
            content = "".join(lines)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return f"data/source/{name}"

    return _write
