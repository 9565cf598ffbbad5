"""Compare the base model with the tuned one: `python -m stages.evaluate`."""

from __future__ import annotations

from stages.core import entry
from stages.core.config.settings import Settings


def run(settings: Settings) -> None:
    """Score the test (or valid) split and write reports/evaluate/."""
    from stages.core.machine import device

    machine = device.prepare(settings.run.device, measure=True)
    from stages.evaluate import work

    work.evaluate(settings, machine)


if __name__ == "__main__":
    raise SystemExit(entry.stage("evaluate", run))
