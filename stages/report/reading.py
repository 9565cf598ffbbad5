"""Files of earlier stages, looked at before a page is made of them: each is what its stage writes.

A file that somebody edited, or that a full disk cut, is named with what it lacks, instead of a
traceback out of the middle of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stages.core import files
from stages.core.errors import UserError

CHANGE = ("loss_change", "loss_change_low", "loss_change_high")
KEYS: dict[str, tuple[str, ...]] = {
    "data/model.json": ("name", "source", "model_type", "num_layers", "hidden_size", "dtype"),
    "reports/validate.json": ("checks",),
    "reports/evaluate/metrics.json": ("base", "tuned", "rows", "targets", *CHANGE),
    "reports/evaluate/samples.json": ("samples",),
    "reports/prove.json": ("results", "examples", "model", "device", "float32", "paddings"),
}
"""What the page cannot do without; everything else may be missing."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "history.csv": ("update", "epoch", "loss", "targets", "tokens", "learning_rate", "grad_norm"),
    "valid.csv": ("update", "loss"),
    "run.csv": ("update", "seconds", "tokens_per_second"),
}
ROWS = ("row", "base_loss", "tuned_loss")


def json(path: Path) -> dict[str, Any] | None:
    """A report, None where there is none.

    Raises:
        UserError: It is no JSON, or not a report of its stage.
    """
    if not path.exists():
        return None
    _require_file(path)
    found = files.read_json(path)
    wanted = KEYS.get(path.as_posix(), ())
    if not isinstance(found, dict):
        raise _strange(path, f"a {type(found).__name__}", "keys with values")
    _require(path, list(found), wanted)
    return found


def csv(path: Path) -> pd.DataFrame:
    """A table of numbers, empty where there is none.

    Raises:
        UserError: It is no CSV file, lacks a column, or holds words where numbers belong.
    """
    if not path.exists():
        return pd.DataFrame()
    _require_file(path)
    try:
        found = pd.read_csv(path)
    except (ValueError, OSError) as error:  # pandas' own errors are ValueErrors
        raise _strange(path, str(error).splitlines()[0], "a CSV file") from error
    wanted = COLUMNS[path.name]
    _require(path, list(found.columns), wanted)
    words = [name for name in wanted if len(found) and not _numbers(found[name])]
    if words:
        raise _strange(path, f"words in {', '.join(words)}", "numbers")
    return found


def parquet(path: Path) -> pd.DataFrame | None:
    """The rows' losses, None where there are none.

    Raises:
        UserError: It is no Parquet file, or lacks a column.
    """
    if not path.exists():
        return None
    _require_file(path)
    try:
        found = pd.read_parquet(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are one of these
        raise _strange(path, str(error).splitlines()[0], "a Parquet file") from error
    _require(path, list(found.columns), ROWS)
    return found


def image(path: Path) -> bytes | None:
    """A PNG file, None where there is none.

    Raises:
        UserError: It is another kind of file.
    """
    if not path.exists():
        return None
    _require_file(path)
    found = path.read_bytes()
    if not found.startswith(b"\x89PNG\r\n"):
        raise _strange(path, f"{len(found)} bytes of something else", "a PNG file")
    return found


def _numbers(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise _strange(path, "a folder", "a file")


def _require(path: Path, found: Sequence[object], wanted: Sequence[str]) -> None:
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise _strange(path, f"no {', no '.join(lacking)}", ", ".join(wanted))


def _strange(path: Path, found: str, expected: str) -> UserError:
    made = "`python -m stages prove`" if path.name == "prove.json" else "`dvc repro`"
    return UserError(
        "A file is not what its stage writes, so there is no report of it",
        where=path.as_posix(),
        found=found,
        expected=expected,
        fix=f"remove it and run {made}",
    )
