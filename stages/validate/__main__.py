"""All that can be known before weights load: `python -m stages.validate`."""

from __future__ import annotations

from pathlib import Path

from stages.core import entry, files
from stages.core.config.settings import Settings


def run(settings: Settings) -> None:
    """Read examples, manifest and reports; write `reports/validate.json` if nothing is wrong."""
    from stages.validate.work import validate

    reports = Path("reports")
    report = validate(Path("data/examples"), Path("data/model.json"), reports, settings)
    files.write_json(reports / "validate.json", report)


if __name__ == "__main__":
    raise SystemExit(entry.stage("validate", run))
