"""Bring rows into one schema and three splits: `python -m stages.collect`."""

from __future__ import annotations

from pathlib import Path

from stages.collect.collect import collect
from stages.core import entry, files
from stages.core.config.settings import Settings


def run(settings: Settings) -> None:
    """Write data/raw/{train,valid,test}.parquet and reports/collect.json."""
    files.remove_leftovers(Path("data"))
    with files.replacing_folder(Path("data/raw")) as folder:
        report = collect(settings.data, folder)
    files.write_json(Path("reports/collect.json"), report)


if __name__ == "__main__":
    raise SystemExit(entry.stage("collect", run))
