"""What a configuration of `mlx_lm.lora` says: its YAML file, its flags, and the defaults below.

Flags win over the file, as in mlx-lm. Names that mlx-lm had once are translated; any other unknown
name is refused, for mlx-lm ignores those without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from stages.commands.converting.conversion import word
from stages.commands.converting.keys import DEFAULTS, KNOWN, OLD, VERSION, from_flags, parsed
from stages.core.config import settings
from stages.core.config.settings import nearest
from stages.core.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
MOST_VALUES = 10_000


@dataclass
class Given:
    """A configuration, with the names of today.

    Attributes:
        values: What was said, without nulls; not the defaults.
        old: Today's name → the old name it was given by.
        from_file: Keys that stand in the file and not among the flags.
        file: The YAML file, or None.
    """

    values: dict[str, Any]
    old: dict[str, str] = field(default_factory=dict)
    from_file: frozenset[str] = frozenset()
    file: Path | None = None

    def said(self, key: str) -> bool:
        """Whether the configuration says something about a key."""
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key] if key in self.values else DEFAULTS[key]

    def told(self, *keys: str) -> str:
        """`key: value` of each key, by the name it was given by."""
        shown = []
        for key in keys:
            name = self.old.get(key, key)
            value = True if name == "use_dora" else self[key]
            default = "" if self.said(key) else " (mlx-lm's default)"
            shown.append(f"{name}: {word(value)}{default}")
        return ", ".join(shown)

    def count(self, key: str, least: int = 1) -> int:
        """A whole number.

        Raises:
            UserError: It is none, or below `least`.
        """
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise wrong(key, value, f"a whole number of at least {least}")
        return value

    def number(self, key: str) -> float:
        """A number.

        Raises:
            UserError: It is none.
        """
        return as_number(key, self[key])

    def switch(self, key: str) -> bool:
        """true or false.

        Raises:
            UserError: It is neither.
        """
        if not isinstance(self[key], bool):
            raise wrong(key, self[key], "true or false")
        return self[key]

    def text(self, key: str) -> str:
        """Words.

        Raises:
            UserError: It is something else.
        """
        if not isinstance(self[key], str) or not self[key].strip():
            raise wrong(key, self[key], "text")
        return self[key]

    def group(self, key: str) -> dict[str, Any]:
        """A mapping.

        Raises:
            UserError: It is something else.
        """
        if not isinstance(self[key], dict):
            raise wrong(key, self[key], "keys with values")
        return self[key]


def read(file: Path | None, flags: Sequence[str]) -> Given:
    """Read a file, flags, or both.

    Raises:
        UserError: There is neither, the file is no YAML, or a name is unknown.
    """
    words = from_flags(flags)
    named = words.pop("config", None)
    if named is not None and file is not None and Path(named) != file:
        raise wrong("config", named, f"one file, and {file} is named already")
    file = file if named is None else Path(named)
    in_file = {} if file is None else from_file(file)
    if not words and not in_file:
        raise UserError(
            "There is nothing to convert",
            found=f"no key in {file}" if file else "neither a file nor flags",
            expected="a YAML file of mlx_lm.lora, or its flags",
            fix="python -m stages convert FILE, or python -m stages convert -- --model … --iters …",
        )
    where = str(file) if in_file else "the flags"
    refuse_unknown("", {**in_file, **words}, (*KNOWN, *OLD), where)
    in_file = {key: value for key, value in in_file.items() if value is not None}
    merged = {**in_file, **words}
    values, old = _today(merged)
    return Given(values, old, frozenset(in_file.keys() - words.keys()), file)


def from_file(file: Path) -> dict[str, Any]:
    """The keys of a YAML file; `1e-5` is a number, as mlx-lm reads it.

    Of a folder, the adapter_config.json in which mlx-lm keeps what it trained with.

    Raises:
        UserError: It is no YAML, no mapping, or holds what mlx-lm would read otherwise.
    """
    if (file / ADAPTER_CONFIG).is_file():
        file = file / ADAPTER_CONFIG
    _look_over(file)
    found = dict(OmegaConf.to_container(settings.parse(file, resolve=False), resolve=False))
    _refuse_interpolation("", found, str(file))
    return found


def _look_over(file: Path) -> None:
    """Refuse what OmegaConf reads as keys and is none, and aliases of aliases.

    Every use of an alias becomes a copy, so that a few lines can fill the memory.
    """
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return  # the reader says it better
    if isinstance(root, yaml.ScalarNode):
        raise UserError(
            "This is no configuration of mlx_lm.lora",
            where=str(file),
            found=root.value[:80],
            expected="`key: value`, a line each",
        )
    left, waiting = MOST_VALUES, [root]
    while waiting and left:
        node, left = waiting.pop(), left - 1
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    if waiting:
        raise UserError(
            "This is no configuration of mlx_lm.lora",
            where=str(file),
            found=f"more than {MOST_VALUES} values, those of its aliases counted",
            expected="some thirty keys",
        )


def _refuse_interpolation(key: str, value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_interpolation(f"{key}.{name}" if key else str(name), item, where)
    elif isinstance(value, list):
        for item in value:
            _refuse_interpolation(key, item, where)
    elif isinstance(value, str) and "${" in value:
        raise UserError(
            "mlx-lm takes ${…} as it stands, and Hydra would replace it",
            where=f"{where}: {key}",
            found=value,
            fix="write the value itself",
        )


def _today(merged: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Old names under their new ones."""
    values = {key: value for key, value in merged.items() if key not in OLD}
    old: dict[str, str] = {}
    for name, key in OLD.items():
        if name not in merged or (name == "use_dora" and merged[name] is False):
            continue
        value = "dora" if name == "use_dora" else merged[name]
        if values.get(key, value) != value and not (name == "use_dora" and values[key] == "lora"):
            raise UserError(
                f"{name} is the old name of {key}, and the two differ",
                where=f"{name}, {key}",
                found=f"{merged[name]} and {values[key]}",
                fix=f"remove one; mlx-lm {VERSION} reads {key}",
            )
        values[key], old[key] = value, name
    return values, old


def refuse_unknown(prefix: str, given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse keys that mlx-lm does not know, all at once, each with the nearest known one.

    Raises:
        UserError: There is one.
    """
    unknown = [str(key) for key in given if key not in known]
    if not unknown:
        return
    close = {key: nearest(key, known) for key in unknown}
    told = [
        f"{prefix}{key}" + (f" (nearest: {prefix}{close[key]})" * bool(close[key]))
        for key in unknown
    ]
    raise UserError(
        f"mlx-lm has no such key{'s' if len(unknown) > 1 else ''}, and would ignore"
        f" {'them' if len(unknown) > 1 else 'it'} without a word",
        where=where,
        found="; ".join(told),
        expected=", ".join(prefix + key for key in known),
        fix="correct or remove what is not known",
    )


def as_number(key: str, value: Any) -> float:
    """A float.

    Raises:
        UserError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(key, value, "a number")
    return float(value)


def wrong(key: str, found: Any, expected: str) -> UserError:
    """The message for a value that mlx-lm could not use either."""
    shown = word(found) if isinstance(found, str) and found else repr(found)
    if isinstance(found, str) and not isinstance(parsed(found), str):
        shown = f'"{found}", which is text'  # a number in quotes
    return UserError(f"{key} cannot be used", where=key, found=shown, expected=expected)
