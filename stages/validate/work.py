"""The stage's work: every check, then one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.core import console, files, paths
from stages.core.config.schema import Settings
from stages.core.errors import UserError
from stages.validate import data, machine, model, run
from stages.validate.check import ERROR, WARNING, Check
from stages.validate.facts import Facts, read_facts

FAILED_FILE = "validate.json"


def validate(examples: Path, manifest: Path, reports: Path, settings: Settings) -> dict[str, Any]:
    """Check everything; print what a person should know.

    Args:
        examples: `data/examples`.
        manifest: `data/model.json`.
        reports: Folder of the reports of collect, tokenize and split.
        settings: All of them.

    Returns:
        The report.

    Raises:
        UserError: Some check is an error; all are in the message, and the whole report in
            `.cache/validate.json`.
    """
    facts = read_facts(examples, manifest, reports)
    checks = [
        *data.checks(facts, settings),
        *model.checks(facts, settings),
        *run.checks(facts, settings),
    ]
    here = list(machine.checks(facts.manifest, settings, paths.cache("checkpoints")))
    report = build(checks, facts, settings)
    tell([*checks, *here])
    errors = [check for check in [*checks, *here] if check.level == ERROR]
    if errors:
        file = paths.cache() / FAILED_FILE
        every = [check.record() for check in [*checks, *here]]
        files.write_json(file, {**report, "ok": False, "checks": every})
        raise refusal(errors)
    epoch = report["updates_per_epoch"]
    console.say(
        f"validate: {report['examples']} examples, {report['targets']} targets, "
        f"{report['updates']} updates, {epoch} an epoch"
    )
    return report


def build(checks: Sequence[Check], facts: Facts, settings: Settings) -> dict[str, Any]:
    """The report: nothing in it depends on the machine."""
    epoch, total = run.updates(facts, settings)
    return {
        "ok": all(check.level != ERROR for check in checks),
        "checks": [check.record() for check in checks],
        "updates_per_epoch": epoch,
        "updates": total,
        "examples": facts.counts["train"].examples,
        "targets": facts.counts["train"].targets,
    }


def tell(checks: Sequence[Check]) -> None:
    """Print warnings, and what else has something to say."""
    for check in checks:
        if check.level == WARNING:
            console.warn(check.line())
        elif check.level != ERROR and check.message:
            console.say(f"{check.name}: {check.message}")


def refusal(errors: Sequence[Check]) -> UserError:
    """One error for all problems."""
    if len(errors) == 1:
        only = errors[0]
        return UserError(
            only.message, where=only.name, found=only.found, expected=only.expected, fix=only.fix
        )
    lines = [check.line() for check in errors]
    return UserError(
        f"{len(errors)} problems stand against this run",
        found="".join(f"\n    {line}" for line in lines),
        fix="mend each as it says, then run again",
    )
