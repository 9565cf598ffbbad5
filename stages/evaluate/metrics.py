"""reports/evaluate/metrics.json: the contract's numbers, and tables beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stages.evaluate.interval import bootstrap
from stages.evaluate.tally import RowTable, Sums, class_name, classes

LARGEST_EXPONENT = 700.0
"""exp of more is no float64; a model that bad needs no exact perplexity."""


def metrics(rows: RowTable, positions: Sums) -> dict[str, Any]:
    """All numbers that the losses give.

    `base`, `tuned`, `rows`, `targets`, `loss_change`, `loss_change_low`, `loss_change_high` are the
    contract (change = tuned − base, nats per target). Numbers appear in `dvc metrics`; lists are
    for the report.

    Args:
        rows: Every row of the split that has targets, at least one.
        positions: Sums by class of position.
    """
    sums = rows.sums
    change = bootstrap(sums.base, sums.tuned, sums.targets)
    length_class = classes(rows.length)
    by_length = sums.grouped(length_class, len(positions.targets))
    return {
        **_totals(sums),
        "rows": len(rows),
        "loss_change": change.change,
        "loss_change_low": change.low,
        "loss_change_high": change.high,
        "resamples": change.resamples,
        "improved_share": float((sums.tuned < sums.base).mean()),
        "by_length": _classes(by_length, np.bincount(length_class, minlength=len(by_length.base))),
        "by_position": _classes(positions, None),
        **_apart(rows),
    }


def perplexity(loss: float) -> float:
    """exp(loss), for a loss in nats."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def _totals(sums: Sums) -> dict[str, Any]:
    targets = int(sums.targets.sum())
    models = {"base": (sums.base, sums.base_correct), "tuned": (sums.tuned, sums.tuned_correct)}
    totals: dict[str, Any] = {"targets": targets}
    for name, (losses, correct) in models.items():
        loss = float(losses.sum()) / targets
        totals[name] = {
            "loss": loss,
            "perplexity": perplexity(loss),
            "token_accuracy": int(correct.sum()) / targets,
        }
    return totals


def _classes(sums: Sums, rows: np.ndarray | None) -> list[dict[str, Any]]:
    """One entry per class that holds targets."""
    found = []
    for c in np.flatnonzero(sums.targets):
        targets = int(sums.targets[c])
        entry = {
            "tokens": class_name(c),
            "targets": targets,
            "base_loss": float(sums.base[c]) / targets,
            "tuned_loss": float(sums.tuned[c]) / targets,
        }
        found.append(entry if rows is None else {**entry, "rows": int(rows[c])})
    return found


def _apart(rows: RowTable) -> dict[str, Any]:
    """Rows that also stand in train say little about new text: shown with and without them."""
    leaked = rows.also_in_train
    if not leaked.any():
        return {"also_in_train": {"rows": 0, "targets": 0}}
    apart = {"also_in_train": {"rows": int(leaked.sum()), **_totals(rows.sums.chosen(leaked))}}
    if not leaked.all():
        only = {"rows": int((~leaked).sum()), **_totals(rows.sums.chosen(~leaked))}
        apart["not_in_train"] = only
    return apart
