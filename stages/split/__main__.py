"""Long rows to examples: `python -m stages.split`."""

from __future__ import annotations

from pathlib import Path

from stages.core import entry, files
from stages.core.config.settings import Settings


def run(settings: Settings) -> None:
    """Read `data/tokens/`; write `data/examples/`, `reports/split.json`, `reports/lengths.png`."""
    from stages.split import picture, work

    files.remove_leftovers(Path("data"))
    report, lengths = work.split(Path("data/tokens"), Path("data/examples"), settings.split)
    files.write_json(Path("reports/split.json"), report)
    picture.draw(Path("reports/lengths.png"), lengths, settings.split.max_seq_length)


if __name__ == "__main__":
    raise SystemExit(entry.stage("split", run))
