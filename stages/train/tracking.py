"""What a run tells wandb or swanlab (`run.report_to`), by mlx-lm's own reporting callbacks.

Every number of history.csv and valid.csv, as it stands there, at the step of its update. Off by
default; a tracker that fails is switched off with a warning and never harms the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_lm.tuner import callbacks

from stages.core import console, paths
from stages.core.config.schema import MATHEMATICS
from stages.core.config.settings import Settings, as_dict, nearest
from stages.core.errors import UserError
from stages.train.history import History, Rows

TRAIN = {"loss": "train_loss"}
VALID = {"loss": "val_loss", "epoch": "val_epoch", "targets": "val_targets", "best": "val_best"}
"""Columns whose name both tables have, under mlx-lm's names or with its prefix."""


def require(report_to: str | None) -> None:
    """Refuse a tracker that is not known or not installed, before anything is loaded.

    Raises:
        UserError: See above.
    """
    known = list(callbacks.SUPPORT_CALLBACK)
    for name in _names(report_to):
        if name not in known:
            close = nearest(name, known)
            raise UserError(
                "run.report_to names no tracker of mlx-lm",
                where="run.report_to",
                found=name,
                expected=", ".join(known),
                fix=f"nearest: {close}" if close else "run.report_to=null reports to none",
            )
        if getattr(callbacks, name) is None:
            raise UserError(
                f"{name} is not installed",
                where="run.report_to",
                found=report_to,
                expected=f"the package {name} in this environment",
                fix=f"`pip install {name}`, or run.report_to=null",
            )


class Tracker:
    """Passes rows on; does nothing until it is started, and nothing more once it has failed."""

    def __init__(self) -> None:
        self._callback: callbacks.TrainingCallback | None = None

    def start(self, settings: Settings, name: str, history: History) -> None:
        """Open the trackers of `run.report_to` and tell them what a resumed run has done so far.

        Args:
            name: Of the run: its fingerprint.
            history: Its rows so far.
        """
        if not _names(settings.run.report_to):
            return
        folder = paths.cache("tracking") / name
        with self._harmless():
            folder.mkdir(parents=True, exist_ok=True)
            self._callback = callbacks.get_reporting_callbacks(
                settings.run.report_to,
                project_name=paths.root().resolve().name,
                log_dir=str(folder),
                config=as_dict(settings, MATHEMATICS),
            )
        for told, _, rows, place in _in_order(history):
            told(self, rows, place)

    def update(self, rows: Rows, place: int = -1) -> None:
        """Report a row of history.csv, by default the last one."""
        if self._callback is not None:
            with self._harmless():
                self._callback.on_train_loss_report(_numbers(rows, place, TRAIN))

    def valid(self, rows: Rows, place: int = -1) -> None:
        """Report a row of valid.csv, by default the last one."""
        if self._callback is not None:
            with self._harmless():
                self._callback.on_val_loss_report(_numbers(rows, place, VALID))

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker raises
            self._callback = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            console.warn(f"run.report_to is off, the run goes on: {reason}")


def _names(report_to: str | None) -> list[str]:
    return [name.strip().lower() for name in (report_to or "").split(",") if name.strip()]


def _in_order(history: History) -> list[tuple[Any, int, Rows, int]]:
    """All rows, those of one update beside each other: trackers refuse a step that goes back."""
    found = [
        (told, int(row[0]), rows, place)
        for told, rows in ((Tracker.update, history.updates), (Tracker.valid, history.valid))
        for place, row in enumerate(rows.rows)
    ]
    return sorted(found, key=lambda entry: entry[1])


def _numbers(rows: Rows, place: int, names: Mapping[str, str]) -> dict[str, Any]:
    """The numbers of one row by their names; `iteration` is the step in mlx-lm's callbacks."""
    row = dict(zip(rows.columns, rows.rows[place], strict=True))
    found = {names.get(key, key): _number(text) for key, text in row.items() if text}
    return {"iteration": int(row["update"]), **found}


def _number(text: str) -> float | int | bool:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else float(text)
