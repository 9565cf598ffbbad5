"""What has to be right before a sweep starts, so that no point fails for a reason known now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.commands.sharing import git, tracked
from stages.commands.sweeping.multirun import Plan
from stages.compose import applied, composition, record
from stages.core.config import settings
from stages.core.errors import UserError

FILES_OF_SETTINGS = ("tokenize.chat_template", "train.initial_adapters")


def require_ready(root: Path) -> None:
    """Refuse a project that a temporary workspace could not be made from.

    Raises:
        UserError: No commit, untracked rows, code or settings, or values of an applied experiment
            that points would not start from; each with what to do.
    """
    git.require_commit(root)
    tracked.require_rows(root)
    tracked.require_project(root)
    require_conf(root)


def require_conf(root: Path) -> None:
    """Refuse mathematics that stands in params.yaml only: points start from conf/.

    Raises:
        UserError: An experiment was applied, and neither kept nor dropped.
    """
    held = beside(root)
    if held:
        raise UserError(
            "params.yaml holds values of an applied experiment, but points start from conf/",
            where=settings.PARAMS,
            found="; ".join(f"{key}={value}" for key, value in held.items()),
            expected="a decision: these values, or those of conf/",
            fix="`python -m stages.compose --keep NAME` makes them part of conf/,"
            " `python -m stages.compose --drop` forgets them",
        )


def beside(root: Path) -> dict[str, Any]:
    """Mathematics of params.yaml that an applied experiment put there, beside conf/."""
    file = root / settings.PARAMS
    if not file.exists():
        return {}
    try:
        current = composition.leaves(settings.parse(file))
    except UserError:
        return {}
    now = composition.leaves(composition.compose(root / "conf"))
    known = record.find(current)
    if known is not None and known.by == record.HAND:
        return {}
    before = known.conf if known is not None else applied.head(root)
    if before is None:
        return {}
    found = applied.compare(current, before, now)
    both = {**found.carried, **found.lost}
    return {key: value for key, value in both.items() if applied.is_mathematics(key)}


def require_settings(root: Path, plan: Plan) -> None:
    """Refuse files that points name by a relative path and that git does not track.

    Raises:
        UserError: As `tracked.require_project`.
    """
    named = {
        str(value)
        for point in plan.points or ()
        for key in FILES_OF_SETTINGS
        if (value := point.mathematics.get(key)) and not Path(str(value)).is_absolute()
    }
    tracked.require_project(root, sorted(named))
