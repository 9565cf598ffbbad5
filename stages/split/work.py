"""The stage's work: all splits through the policy, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stages.core import console, files, tables
from stages.core.config.schema import Split
from stages.core.errors import UserError
from stages.split.stream import split_table
from stages.split.tally import Tally

MOST_ROWS_SHOWN = 50


def split(tokens: Path, out: Path, settings: Split) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Cut every split of `tokens` into examples in the folder `out`, whole or not at all.

    Args:
        tokens: Folder of the tokenize stage.
        out: Gets `train.parquet`, `valid.parquet` and `test.parquet`.
        settings: The group `split`.

    Returns:
        The report, and for each split the tokens of its rows before the cut (int32).

    Raises:
        UserError: Under the policy `error` rows are over the cap; all are named.
    """
    tallies = {name: Tally(settings) for name in tables.SPLITS}
    with files.replacing_folder(out) as folder:
        for name, tally in tallies.items():
            split_table(tokens / f"{name}.parquet", folder / f"{name}.parquet", settings, tally)
        refuse_long(tallies, settings)
    report = {
        "policy": settings.policy,
        "max_seq_length": settings.max_seq_length,
        "overlap": settings.overlap,
        "splits": {name: tally.record() for name, tally in tallies.items()},
    }
    tell(report)
    return report, {name: tally.lengths for name, tally in tallies.items()}


def refuse_long(tallies: dict[str, Tally], settings: Split) -> None:
    """Refuse rows over the cap under the policy `error`.

    Raises:
        UserError: There are any.
    """
    rows = [row for tally in tallies.values() for row in tally.too_long]
    if not rows:
        return
    shown = [f"{source} line {line}: {length} tokens" for source, line, length in rows]
    if len(shown) > MOST_ROWS_SHOWN:
        shown = [*shown[:MOST_ROWS_SHOWN], f"and {len(rows) - MOST_ROWS_SHOWN} more"]
    longest = max(length for _, _, length in rows)
    raise UserError(
        f"split.policy=error, and rows are longer than the cap: {len(rows)}",
        where="split.policy",
        found="".join(f"\n    {line}" for line in shown),
        expected=f"at most {settings.max_seq_length} tokens",
        fix=f"set split.max_seq_length to {longest}, or another split.policy",
    )


def tell(report: dict[str, Any]) -> None:
    """Print what survived, and warn of what did not."""
    for name, counts in report["splits"].items():
        console.say(
            f"split {name}: {counts['rows_in']} rows, {counts['rows_over']} over "
            f"{report['max_seq_length']} tokens, {counts['examples']} examples, "
            f"{counts['targets']} of {counts['targets_in']} targets"
        )
        if counts["targets_lost"]:
            share = counts["targets_lost"] / counts["targets_in"]
            console.warn(
                f"{name}: {report['policy']} loses {counts['targets_lost']} targets ({share:.1%}) "
                f"and {counts['end_tokens_lost']} end tokens; {counts['rows_truncated']} rows are "
                f"cut, {counts['rows_dropped']} dropped"
            )
