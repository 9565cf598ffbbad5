"""What a sweep found: reports/sweeps/NAME/ with points.parquet, points.csv and sweep.html."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stages.commands.sweeping import experiments, state
from stages.commands.sweeping.experiments import Found
from stages.commands.sweeping.points import Sweep
from stages.commands.sweeping.state import State
from stages.core import console, files

FOLDER = Path("reports/sweeps")
NUMBERS = (
    "base_loss",
    "base_perplexity",
    "tuned_loss",
    "tuned_perplexity",
    "loss_change",
    "loss_change_low",
    "loss_change_high",
    "peak_gb",
    "train_seconds",
    "seconds",
)


def collect(sweep: Sweep, asked: Sequence[State]) -> pd.DataFrame:
    """One row per point: those asked for, then the others that this sweep's name has done before.

    Columns: point (1-based), experiment, state, every overridden key, `NUMBERS` (losses in nats,
    memory in GB, training and whole point in seconds), commit, reason.
    """
    keys = {one.key for one in asked}
    earlier = [
        one
        for one in state.all_states(sweep.folder)
        if one.state == state.DONE and one.key not in keys
    ]
    known = experiments.names(sweep.root)
    rows = [_row(sweep, one, known) for one in [*asked, *earlier]]
    table = pd.DataFrame(rows)
    table.insert(0, "point", range(1, len(table) + 1))
    for key in overridden(table):
        table[key] = _typed(table[key])
    table[list(NUMBERS)] = table[list(NUMBERS)].astype("float64")
    return table


def overridden(table: pd.DataFrame) -> list[str]:
    """The columns that hold overridden keys."""
    fixed = {"point", "experiment", "state", "commit", "reason", *NUMBERS}
    return [name for name in table.columns if name not in fixed]


def varied(table: pd.DataFrame) -> list[str]:
    """The overridden keys that have more than one value."""
    return [key for key in overridden(table) if table[key].nunique(dropna=False) > 1]


def ranked(table: pd.DataFrame) -> pd.DataFrame:
    """The finished points, the lowest loss first."""
    return table[table["state"] == state.DONE].sort_values("tuned_loss", kind="stable")


def write(sweep: Sweep, table: pd.DataFrame) -> Path:
    """Write the table and the page, and give their folder."""
    from stages.commands.sweeping import page

    folder = sweep.root / FOLDER / sweep.name
    with files.replacing(folder / "points.parquet") as temporary:
        table.to_parquet(temporary, compression="zstd", index=False)
    with files.replacing(folder / "points.csv") as temporary:
        table.to_csv(temporary, index=False)
    files.write_text(folder / "sweep.html", page.build(sweep, table))
    return folder


def leaderboard(sweep: Sweep, table: pd.DataFrame) -> None:
    """The finished points on the console, the best first."""
    best = ranked(table)
    if best.empty:
        return
    console.table(
        f"sweep {sweep.name}: the lowest loss first",
        ("experiment", "loss (nats)", "change", "peak GB", "training s"),
        [
            (
                row["experiment"],
                f"{row['tuned_loss']:.4f}",
                f"{row['loss_change']:+.4f}",
                _number(row["peak_gb"], 3),
                _number(row["train_seconds"], 1),
            )
            for _, row in best.iterrows()
        ],
    )


def _row(sweep: Sweep, one: State, known: dict[str, list[str]]) -> dict[str, Any]:
    metrics = one.metrics if one.state == state.DONE else {}
    revisions = known.get(one.experiment, []) if metrics else []
    telemetry: dict[str, Any] = {"peak_gb": None, "train_seconds": None}
    if revisions:
        telemetry = experiments.telemetry(sweep.root, Found(one.experiment, revisions[-1]))
    numbers = {
        f"{name}_{what}": metrics.get(name, {}).get(what)
        for name in ("base", "tuned")
        for what in ("loss", "perplexity")
    }
    changes = ("loss_change", "loss_change_low", "loss_change_high")
    return {
        "experiment": one.experiment,
        "state": one.state,
        **one.values,
        **numbers,
        **{name: metrics.get(name) for name in changes},
        **telemetry,
        "seconds": one.seconds if metrics else None,
        "commit": revisions[-1][:12] if revisions else "",
        "reason": one.reason,
    }


def _typed(values: pd.Series) -> pd.Series:
    """Numbers as numbers; anything else as text, lists and mappings as JSON."""
    given = values.dropna()
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in given):
        return pd.to_numeric(values)
    return values.map(lambda value: value if isinstance(value, str) else json.dumps(value))


def _number(value: float, digits: int) -> str:
    return "–" if pd.isna(value) else f"{value:.{digits}f}"
