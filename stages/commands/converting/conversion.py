"""The result of a conversion: values under our keys, and a line for every old key."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

PLAIN = re.compile(r"[A-Za-z_./][\w./:@-]*")


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        old: `key: value` as mlx-lm has it.
        new: `key=value` of each key here, or where it went.
        notes: What a person should know.
    """

    old: str
    new: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass
class Conversion:
    """What a configuration means here.

    Attributes:
        groups: Config group → choice (`model` → `hub`).
        values: Mathematics, by dotted key.
        machine: `memory.*` and `run.*` that mlx-lm ran with: no part of an experiment.
        lines: The table.
        todo: What is left for the person to do.
    """

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)

    def add(self, old: str, new: dict[str, Any], *notes: str) -> None:
        """Take over a key as these values of ours; empty notes are left out."""
        for key, value in new.items():
            target = self.machine if key.startswith(("memory.", "run.")) else self.values
            target[key] = value
        shown = [text for key, value in new.items() for text in _overrides(key, value)]
        self.lines.append(Line(old, tuple(shown), tuple(filter(None, notes))))

    def drop(self, old: str, where: str, *notes: str) -> None:
        """Say why a key has no counterpart."""
        self.lines.append(Line(old, (f"({where})",), tuple(filter(None, notes))))

    def overrides(self) -> list[str]:
        """The experiment in Hydra's grammar."""
        chosen = [f"{group}={choice}" for group, choice in self.groups.items()]
        return chosen + [
            text for key, value in self.values.items() for text in _overrides(key, value)
        ]

    def preset(self, origin: str) -> str:
        """The text of conf/experiment/NAME.yaml.

        Args:
            origin: Where it comes from, for its first line.
        """
        nested = OmegaConf.create()
        for key, value in self.values.items():
            OmegaConf.update(nested, key, value, merge=False, force_add=True)
        groups = "".join(
            f"  - override /{group}: {choice}\n" for group, choice in self.groups.items()
        )
        head = f"# @package _global_\n# From {origin} of mlx-lm, by `python -m stages convert`.\n"
        return f"{head}defaults:\n{groups}\n{OmegaConf.to_yaml(nested)}"


def _overrides(key: str, value: Any) -> list[str]:
    """A value as overrides; what a free mapping holds is new to Hydra, and needs plus signs."""
    if isinstance(value, dict) and value:
        return [f"++{key}.{name}={word(item)}" for name, item in value.items()]
    return [f"{key}={word(value)}"]


def word(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(word(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{word(item)}' for key, item in value.items())}}}"
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in (
            "null",
            "true",
            "false",
            "nan",
            "inf",
        )
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return value if plain else f"'{escaped}'"
    return str(value)
