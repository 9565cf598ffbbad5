"""What a run leaves to read: history.csv, valid.csv (results), run.csv (telemetry).

Rows are formatted once, when they happen, and travel through checkpoints as text, so that a resumed
run's files equal those of a run that was never stopped.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.core import files

HISTORY = ("update", "epoch", "loss", "targets", "tokens", "learning_rate", "grad_norm")
VALID = ("update", "epoch", "loss", "targets", "best")
RUN = (
    "update",
    "seconds",
    "tokens_per_second",
    "active_gb",
    "cache_gb",
    "peak_gb",
    "footprint_gb",
)


@dataclass
class Rows:
    """One CSV file in memory."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """Append a row; None stays empty, a float keeps 9 significant digits (all of a float32)."""
        self.rows.append(tuple(_text(values[name]) for name in self.columns))

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        files.write_text(path, text.getvalue())

    def read(self, path: Path) -> None:
        """Take the rows of a file that `write` wrote.

        Raises:
            ValueError: Its columns are others.
        """
        with open(path, newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        if tuple(header) != self.columns:
            raise ValueError(f"{path.name} has the columns {header}")
        self.rows = [tuple(row) for row in rows]


@dataclass
class History:
    """All rows of a run so far."""

    updates: Rows = field(default_factory=lambda: Rows(HISTORY))
    valid: Rows = field(default_factory=lambda: Rows(VALID))
    run: Rows = field(default_factory=lambda: Rows(RUN))

    def write(self, folder: Path) -> None:
        """Write the three files into a folder."""
        for name, rows in self._files().items():
            rows.write(folder / name)

    def read(self, folder: Path) -> None:
        """Take the rows that `write` wrote into a folder."""
        for name, rows in self._files().items():
            rows.read(folder / name)

    def _files(self) -> dict[str, Rows]:
        return {"history.csv": self.updates, "valid.csv": self.valid, "run.csv": self.run}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)
