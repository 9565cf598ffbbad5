"""Take a finished point into the workspace, and its values into conf/experiment/."""

from __future__ import annotations

from pathlib import Path

from stages.commands.sharing import dvc
from stages.commands.sweeping import checks, experiments
from stages.compose import workspace
from stages.core import console
from stages.core.config import settings
from stages.core.errors import UserError, listed


def apply(root: Path, experiment: str, name: str | None) -> None:
    """`dvc exp apply`, then what `python -m stages.compose --keep` does.

    Args:
        root: The project's folder.
        experiment: As `dvc exp show` and the leaderboard print it.
        name: conf/experiment/NAME.yaml; default: the experiment's own.

    Raises:
        UserError: There is no such experiment, or the name is taken.
        RunFailed: DVC refuses.
    """
    name = name or experiment
    known = experiments.names(root)
    if experiment not in known:
        close = settings.nearest(experiment, list(known))
        raise UserError(
            "There is no such experiment",
            found=experiment,
            expected=listed(sorted(known)),
            fix=f"nearest: {close}" if close else "`dvc exp list --all-commits` names them all",
        )
    file = root / "conf/experiment" / f"{name}.yaml"
    if file.exists():
        raise UserError(
            "This name is taken in conf/experiment",
            where=str(file.relative_to(root)),
            fix=f"python -m stages sweep --apply {experiment} --keep ANOTHER_NAME",
        )
    dvc.run("exp", "apply", experiment, cwd=root)
    console.say(f"{experiment} stands in the workspace")
    if checks.beside(root):
        workspace.write(root, keep=name)
    else:
        console.say("conf/ says the same already")
    console.say("`dvc repro` runs compose only; commit conf/, params.yaml, dvc.lock and reports/")
