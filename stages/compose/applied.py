"""Values that stand in params.yaml and not in conf/: those of an applied experiment.

A three-way comparison: params.yaml, conf/ as it was when that params.yaml came about (its record,
else conf/ of git's HEAD), and conf/ now.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.compose import composition
from stages.core.config import schema
from stages.core.errors import UserError

Values = dict[str, Any]


@dataclass(frozen=True)
class Applied:
    """What to do with the values of an applied experiment.

    Attributes:
        carried: Stay as they are: conf/ was not edited in a way that concerns them.
        lost: Would go if params.yaml were composed now, so a person decides.
    """

    carried: Values
    lost: Values


def compare(current: Values, before: Values, now: Values) -> Applied:
    """Sort the values that params.yaml holds beside conf/.

    While only memory and run keys of conf/ changed, an experiment's mathematics stays; a memory or
    run value stays unless conf/ changed that very key. Once the mathematics of conf/ changed, the
    experiment's mathematics can't be told from an old run's: those values are `lost`.

    Args:
        current: params.yaml.
        before: conf/ alone, when params.yaml came about.
        now: conf/ alone, as it is.
    """
    beside = {
        key: value
        for key, value in current.items()
        if key in now and value != now[key] and (key not in before or value != before[key])
    }
    edited = {key for key in now if key not in before or before[key] != now[key]}
    mathematics_edited = any(is_mathematics(key) for key in edited)
    lost = {key: beside[key] for key in beside if mathematics_edited and is_mathematics(key)}
    overruled = {key for key in edited if not is_mathematics(key)}
    carried = {key: beside[key] for key in beside if key not in lost and key not in overruled}
    return Applied(carried=carried, lost=lost)


def is_mathematics(key: str) -> bool:
    """Whether a dotted key is part of a run's identity."""
    return key.split(".", maxsplit=1)[0] in schema.MATHEMATICS


def head(folder: Path) -> Values | None:
    """conf/ of git's HEAD, composed; {} where it cannot be, None where there is no commit."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD", "--", "conf"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        return None
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(temporary, filter="data")
        try:
            return composition.leaves(composition.compose(Path(temporary) / "conf"))
        except UserError:
            return {}


def undecided(lost: Values, now: Values) -> UserError:
    """The message that lists what would be lost."""
    found = "; ".join(f"{key}={value} (conf/ says {now[key]})" for key, value in lost.items())
    return UserError(
        "conf/ was edited while params.yaml holds values of an applied experiment",
        where="params.yaml",
        found=found,
        expected="a decision: these values, or those of conf/",
        fix="`python -m stages.compose --keep NAME` writes them to conf/experiment/NAME.yaml and"
        " selects it, `python -m stages.compose --drop` forgets them; then `dvc repro`",
    )
