"""Write benchmarks/lengths.json from the default job's tokens: `python -m benchmarks.lengths`.

A list of [index of the first target, length up to the last target], one per training row: with it a
machine without tokenizer or corpus takes figures at real lengths.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks import workspace
from benchmarks.gpu import LENGTHS
from stages.core import files, tables

PER_LINE = 8


def pairs(path: Path) -> list[list[int]]:
    """[first target, length] of each row of a table of tokens that has targets."""
    found = []
    for batch in tables.batches(path, ["target_mask"]):
        for mask in batch["target_mask"].to_pylist():
            places = np.flatnonzero(mask)
            places = places[places > 0]
            if len(places):
                found.append([int(places[0]), int(places[-1]) + 1])
    return found


def text(found: list[list[int]]) -> str:
    """As JSON, a few to a line."""
    lines = [
        ", ".join(map(json.dumps, found[at : at + PER_LINE]))
        for at in range(0, len(found), PER_LINE)
    ]
    return "[" + ",\n".join(lines) + "]\n"


if __name__ == "__main__":
    tokens = workspace.make("smollm2") / "data" / "tokens" / "train.parquet"
    files.write_text(LENGTHS, text(pairs(tokens)))
