"""Try a conversion on a copy of conf/, then write conf/experiment/NAME.yaml."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from stages.commands.converting.conversion import Conversion
from stages.compose import composition
from stages.core import files
from stages.core.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w-]*")


def name_of(asked: str | None, file: Path | None) -> str:
    """The experiment's name: as asked for, else after the file.

    Raises:
        UserError: It is no name of a file.
    """
    plain = re.sub(r"[^\w-]+", "-", file.stem).strip("-_") if file else "mlx-lm"
    name = asked or plain
    if not NAME.fullmatch(name):
        raise UserError(
            "An experiment cannot have this name",
            where="--name",
            found=name,
            expected="letters, digits, - and _",
        )
    return name


def write(conf: Path, name: str, origin: str, found: Conversion) -> Path:
    """Write the experiment, once it composes to the values it stands for.

    Args:
        conf: The folder with config.yaml.
        origin: What was converted, for the file's first line.

    Returns:
        The file.

    Raises:
        UserError: There is such an experiment, or a value is one that no run could use.
    """
    file = conf / "experiment" / f"{name}.yaml"
    if file.exists():
        raise UserError(
            "There is such an experiment already",
            where=file.as_posix(),
            fix="choose another name: --name NAME, or remove the file",
        )
    text = found.preset(origin)
    with tempfile.TemporaryDirectory() as temporary:
        trial = Path(temporary) / "conf"
        shutil.copytree(conf, trial)
        (trial / "experiment" / f"{name}.yaml").write_text(text, encoding="utf-8")
        _compare(trial, name, origin, found)
    files.write_text(file, text)
    return file


def _compare(trial: Path, name: str, origin: str, found: Conversion) -> None:
    """Compose the experiment and look at every value; a commit that is still missing is made up."""
    words, expected = [f"experiment={name}"], dict(found.values)
    if found.groups["model"] == "hub" and expected["model.revision"] is None:
        expected["model.revision"] = "0" * 40
        words.append(f"model.revision={expected['model.revision']}")
    try:
        composed = composition.leaves(composition.compose(trial, words))
    except UserError as error:  # a value of the configuration, not one of conf/
        error.fix = f"correct {origin} of mlx-lm, then convert it again"
        raise
    wrong = [key for key, value in expected.items() if composed[key] != value]
    if wrong:
        raise UserError(
            "These values do not fit conf/",
            where=", ".join(wrong),
            found="; ".join(f"{key}={composed[key]}" for key in wrong),
            expected="; ".join(f"{key}={expected[key]}" for key in wrong),
            fix="look at what conf/config.yaml lays over the experiment",
        )
