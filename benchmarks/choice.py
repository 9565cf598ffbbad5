"""The examples of a figure: a few real ones with one range of targets, as mlx-lm can train them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.core import tables
from stages.core.tables import Examples

Row = tuple[np.ndarray, np.ndarray]
"""Tokens int32 (T,) and target mask bool (T,)."""


def usable(examples: Examples, cap: int) -> list[Row]:
    """Examples cut to `cap` tokens and to their last target; with one unbroken range of targets.

    What follows the last target changes no loss, but mlx-lm would count it as targets. It knows
    one range per row, so others are left out.
    """
    rows = []
    for i in range(len(examples)):
        tokens, mask = examples.example(i)
        places = np.flatnonzero(mask[:cap])
        places = places[places > 0]
        if len(places) and places[-1] - places[0] + 1 == len(places):
            end = places[-1] + 1
            clean = np.zeros(end, bool)
            clean[places] = True
            rows.append((tokens[:end], clean))
    return rows


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """`count` rows at even steps of length, in their first order."""
    if len(rows) < count:
        raise ValueError(f"{len(rows)} usable examples, {count} wanted")
    by_length = np.argsort([len(tokens) for tokens, _ in rows], kind="stable")
    steps = np.round(np.linspace(0, len(rows) - 1, count)).astype(int)
    return [rows[i] for i in sorted(by_length[steps].tolist())]


def longest(rows: Sequence[Row], count: int) -> list[Row]:
    """The `count` longest rows, in their first order."""
    by_length = np.argsort([-len(tokens) for tokens, _ in rows], kind="stable")
    return [rows[i] for i in sorted(by_length[:count].tolist())]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a table of examples."""
    columns = {
        "example": range(len(rows)),
        "row": range(len(rows)),
        "piece": [0] * len(rows),
        "tokens": [tokens.tolist() for tokens, _ in rows],
        "target_mask": [mask.tolist() for _, mask in rows],
    }
    table = pa.table({name: list(x) for name, x in columns.items()}, schema=tables.EXAMPLES)
    with tables.writing(path, tables.EXAMPLES) as writer:
        writer.write_table(table)


def random(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 0) -> list[Row]:
    """Random tokens of given (index of the first target, length)."""
    draw = np.random.default_rng(seed)
    rows = []
    for first, length in lengths:
        tokens = draw.integers(1, vocabulary, length).astype(np.int32)
        rows.append((tokens, np.arange(length) >= first))
    return rows
