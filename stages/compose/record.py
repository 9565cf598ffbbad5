"""What conf/ said when a params.yaml came about: `.cache/compose/<fingerprint>.json`.

One small file for each params.yaml seen, so that parallel experiments need no lock. With it compose
can tell a value that conf/ held from one that `dvc exp run -S` put on top.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.core import files, paths
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint

MOST = 500
FROM_CONF, EXPERIMENT, HAND = "conf", "experiment", "hand"


@dataclass(frozen=True)
class Record:
    """Where a params.yaml came from.

    Attributes:
        conf: Dotted key → value of conf/ alone, without overrides.
        by: `conf`, `experiment` (`dvc exp run`) or `hand` (`python -m stages.compose key=value`).
    """

    conf: dict[str, Any]
    by: str


def find(values: dict[str, Any]) -> Record | None:
    """The record of a params.yaml with these values, None where none was kept."""
    file = _file(values)
    if not file.exists():
        return None
    try:
        return Record(**files.read_json(file))
    except (UserError, TypeError):
        return None


def keep(values: dict[str, Any], record: Record) -> None:
    """Keep the record of a params.yaml; the oldest ones beyond `MOST` go."""
    files.write_json(_file(values), asdict(record))
    kept = sorted(_folder().glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in kept[:-MOST]:
        file.unlink(missing_ok=True)


def _folder() -> Path:
    return paths.cache("compose")


def _file(values: dict[str, Any]) -> Path:
    return _folder() / f"{fingerprint(values)}.json"
