"""Write reports/report.html and reports/card.md: `python -m stages.report`."""

from __future__ import annotations

from pathlib import Path

from stages.core import console, entry, files
from stages.core.config.settings import Settings

PAGE, CARD = Path("reports/report.html"), Path("reports/card.md")


def run(settings: Settings) -> None:
    """Read what the earlier stages left and write the page and the card."""
    from stages.report import card, inputs, page

    found = inputs.read(settings)
    files.write_text(PAGE, page.build(found))
    files.write_text(CARD, card.build(found))
    for stage, names in found.missing.items():
        console.warn(f"not in the report, since {stage} has not made it: {', '.join(names)}")
    console.say(f"report: {PAGE}, {CARD}")


if __name__ == "__main__":
    raise SystemExit(entry.stage("report", run))
