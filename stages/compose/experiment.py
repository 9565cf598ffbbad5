"""Make the values of an applied experiment part of conf/: conf/experiment/NAME.yaml, selected."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.compose import composition
from stages.core import files
from stages.core.errors import UserError

SELECTION = re.compile(r"^(\s*-\s*experiment:\s*)([\w-]+)", re.MULTILINE)


def keep(conf: Path, name: str, values: dict[str, Any]) -> None:
    """Write `values` as conf/experiment/`name`.yaml and select it in conf/config.yaml.

    An experiment that is selected already stays below the new one. Both files are tried on a copy
    of conf/ first.

    Raises:
        UserError: The name is no file name or is taken; config.yaml has no `experiment` line; the
            values cannot be said in a file (a key taken out of a free mapping).
    """
    config, selected = _select(conf, name)
    preset = _preset(selected, values)
    with tempfile.TemporaryDirectory() as temporary:
        trial = Path(temporary) / "conf"
        shutil.copytree(conf, trial)
        _write(trial, name, preset, config)
        composed = composition.leaves(composition.compose(trial))
    wrong = [key for key, value in values.items() if composed[key] != value]
    if wrong:
        raise UserError(
            "These values cannot be kept as an experiment",
            where=", ".join(wrong),
            found="; ".join(f"{key}={values[key]}" for key in wrong),
            expected="values that can be laid over those of conf/",
            fix="edit conf/ by hand, then `python -m stages.compose --drop`",
        )
    _write(conf, name, preset, config)


def _select(conf: Path, name: str) -> tuple[str, str]:
    """The new text of config.yaml, and the experiment that it selected before ("null": none)."""
    file = conf / "experiment" / f"{name}.yaml"
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name) or file.exists():
        raise UserError(
            "An experiment cannot be kept under this name",
            where=f"conf/experiment/{name}.yaml",
            found="the file exists" if file.exists() else name,
            expected="a new name of letters, digits, - and _",
            fix="choose another name",
        )
    text = (conf / "config.yaml").read_text(encoding="utf-8")
    line = SELECTION.search(text)
    if line is None:
        raise UserError(
            "conf/config.yaml selects no experiment",
            where="conf/config.yaml",
            expected="a line `- experiment: null` among its defaults",
            fix="add that line as the last of the defaults",
        )
    return SELECTION.sub(lambda match: match[1] + name, text, count=1), line[2]


def _preset(selected: str, values: dict[str, Any]) -> str:
    nested = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(nested, key, value, merge=False, force_add=True)
    below = "" if selected == "null" else f"defaults:\n  - {selected}\n  - _self_\n\n"
    return f"# @package _global_\n# Kept from an applied experiment.\n{below}" + OmegaConf.to_yaml(
        nested
    )


def _write(conf: Path, name: str, preset: str, config: str) -> None:
    files.write_text(conf / "experiment" / f"{name}.yaml", preset)
    files.write_text(conf / "config.yaml", config)
