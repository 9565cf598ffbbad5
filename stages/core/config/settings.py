"""The settings of a run: params.yaml, then `local.yaml`, then `key=value` of the command line.

params.yaml is what compose (or `dvc exp run -S`) wrote. local.yaml and the command line may set
`memory.*` and `run.*` only: what belongs to this machine never changes the mathematics.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stages.core import paths
from stages.core.config import schema
from stages.core.config.checks import problems
from stages.core.config.schema import Settings
from stages.core.errors import UserError

__all__ = [
    "Settings",
    "as_dict",
    "known_keys",
    "load_settings",
    "nearest",
    "parse",
    "schema_error",
    "to_settings",
]

PARAMS = "params.yaml"


def load_settings(folder: Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """Merge the settings of one run and check every value.

    Args:
        folder: Where params.yaml lies; default: the current directory.
        overrides: `memory.*` and `run.*` as `key=value`, strongest.

    Raises:
        UserError: A file is missing or no YAML, a key is unknown (the nearest is named), a type is
            wrong, or a value is out of range (all such values at once).
    """
    file = (folder or paths.here()) / PARAMS
    if not file.exists():
        raise UserError(
            "There is no params.yaml here",
            where=str(file),
            fix="run from the project's root; `python -m stages.compose` writes params.yaml",
        )
    layers = [(PARAMS, parse(file))]
    local = paths.local_settings()
    if local.exists():
        layers.append((local.name, machine_only(parse(local), local.name)))
    layers.append(("the command line", machine_only(from_dotlist(overrides), "the command line")))
    merged = OmegaConf.structured(Settings)
    for where, layer in layers:
        merged = merge(merged, layer, where)
    return to_settings(merged, layers[1:])


def parse(file: Path, resolve: bool = True) -> DictConfig:
    """Read a settings file as OmegaConf does (`1e-5` is a number there).

    Args:
        resolve: Put values in the place of `${…}`; without it they stay as they are written.

    Raises:
        UserError: It is no YAML, or no mapping.
    """
    try:
        loaded = OmegaConf.load(file)
        if resolve and isinstance(loaded, DictConfig):
            OmegaConf.resolve(loaded)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UserError(
            "A settings file is not YAML",
            where=f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file),
            found=error.problem,
            expected="`group:` with keys below, indented with spaces",
            fix="indent with spaces, no tabs"
            if "\\t" in str(error.problem)
            else "correct that line",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise UserError(
            "A settings file cannot be read",
            where=str(file),
            found=error,
            expected="YAML in UTF-8: `group:` with keys below",
            fix="correct that file",
        ) from error
    if not isinstance(loaded, DictConfig):
        raise UserError(
            "A settings file holds no keys",
            where=str(file),
            found=loaded,
            expected="`group:` with keys below",
            fix="correct that file",
        )
    return loaded


def from_dotlist(overrides: Sequence[str]) -> DictConfig:
    """Turn `key=value` words into a nested mapping, values read as YAML.

    Raises:
        UserError: A word has no `=`.
    """
    for word in overrides:
        if not re.match(r"^[a-z_][\w.]*=", word):
            raise UserError(
                "An argument is not understood",
                where="the command line",
                found=word,
                expected="memory.<key>=<value> or run.<key>=<value>",
            )
    try:
        layer = OmegaConf.from_dotlist(list(overrides))
        OmegaConf.resolve(layer)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            "A value on the command line cannot be read",
            where="the command line",
            found=" ".join(overrides),
            expected="a value as YAML writes it",
            fix="write memory.<key>=<value>, the value a number or a word",
        ) from error
    return layer


def machine_only(layer: DictConfig, where: str) -> DictConfig:
    """Refuse mathematics where only machine settings belong.

    Raises:
        UserError: The layer sets a key outside `memory` and `run`.
    """
    for group in layer:
        if group not in schema.MACHINE:
            known = str(group) in schema.GROUPS
            raise UserError(
                f"{where} may set memory.* and run.* only",
                where=where,
                found=str(group),
                expected="memory or run",
                fix="edit conf/ (or `dvc exp run -S`): it is part of the run's identity"
                if known
                else _nearest_group(str(group)),
            )
    # A group whose keys are all commented out says nothing.
    said = {
        group: keys for group, keys in OmegaConf.to_container(layer).items() if keys is not None
    }
    return OmegaConf.create(said)


def _nearest_group(name: str) -> str:
    close = nearest(name, schema.MACHINE)
    return f"nearest known group: {close}" if close else "write `memory:` or `run:`, keys below it"


def merge(base: DictConfig, layer: DictConfig, where: str) -> DictConfig:
    """Merge one layer strictly on the schema.

    Raises:
        UserError: Unknown key (nearest named), wrong type, or `???` in place of a value.
    """
    missing = OmegaConf.missing_keys(layer)
    if missing:
        raise UserError(
            "Settings have no value",
            where=where,
            found=", ".join(f"{key}=???" for key in sorted(missing)),
            expected="a value for each",
            fix=f"give them one in {'conf/' if where == PARAMS else where}",
        )
    _refuse_flat_groups(layer, where)
    try:
        return OmegaConf.merge(base, layer)
    except OmegaConfBaseException as error:
        raise schema_error(error, where) from error


def _refuse_flat_groups(layer: DictConfig, where: str) -> None:
    """Refuse `memory: 3`: a group has keys below it.

    Raises:
        UserError: A group of the schema holds a value or a list.
    """
    for key, below in _groups().items():
        value = OmegaConf.select(layer, key)
        if value is not None and not isinstance(value, DictConfig):
            raise UserError(
                f"{key} is a group of settings, not a setting",
                where=f"{where}, key {key}",
                found=f"{key}: {value}",
                expected="keys below it: " + ", ".join(name.rsplit(".", 1)[-1] for name in below),
                fix=f"write {below[0]}, or what you mean, with its value",
            )


@functools.cache
def _groups() -> dict[str, list[str]]:
    """Each group of the schema in dotted form, and the keys below it."""
    below = {key: [name for name in known_keys() if name.startswith(key + ".")]
             for key in known_keys()}  # fmt: skip
    return {key: names for key, names in below.items() if names}


def schema_error(error: OmegaConfBaseException, where: str) -> UserError:
    """The message for an unknown key (nearest named) or a wrong type."""
    key = str(error.full_key or error.key)
    text = str(error.msg or error).splitlines()[0]
    if key in known_keys():
        return UserError(
            "A setting has the wrong type",
            where=f"{where}, key {key}",
            found=text,
            expected=_type_words(key),
            fix=f"correct {key} there",
        )
    close = nearest(key, known_keys())
    if key == "experiment":
        hint = "begin a file of conf/experiment with the line `# @package _global_`"
    else:
        hint = f"nearest known key: {close}" if close else "see `python -m stages.compose --help`"
    return UserError(
        f"Unknown setting {key}",
        where=where,
        found=key,
        expected="a key of stages/core/config/schema.py",
        fix=hint,
    )


def _type_words(key: str) -> str:
    """The type of a key of the schema, as a person says it."""
    *groups, name = key.split(".")
    owner: Any = Settings()
    for group in groups:
        owner = getattr(owner, group)
    text = next(str(item.type) for item in dataclasses.fields(owner) if item.name == name)
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    words |= {"dict": "keys with values", "list": "a list"}
    kind = re.split(r"\W", text, maxsplit=1)[0]
    return words.get(kind, "keys below it") + (", or null" if "None" in text else "")


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key closest to a misspelt one, "" where nothing comes near."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return close[0]
    tail = key.rsplit(".", 1)[-1]
    tails = {name.rsplit(".", 1)[-1]: name for name in known}
    close = difflib.get_close_matches(tail, list(tails), n=1, cutoff=0.6)
    return tails[close[0]] if close else ""


@functools.cache
def known_keys() -> tuple[str, ...]:
    """Every key of the schema in dotted form, groups included."""
    return tuple(_walk(Settings, ""))


def _walk(cls: type, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        yield name
        default = item.default_factory
        if default is not dataclasses.MISSING and dataclasses.is_dataclass(default):
            yield from _walk(default, name + ".")


def to_settings(merged: DictConfig, over: Sequence[tuple[str, DictConfig]] = ()) -> Settings:
    """Turn a merged configuration into dataclasses and check every value.

    Args:
        merged: All layers.
        over: Name and values of each layer that was laid over params.yaml, the strongest last.

    Raises:
        UserError: Values are out of range; all of them are listed, each with where it comes from.
    """
    try:
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise schema_error(error, PARAMS) from error
    _normalise(settings)
    found = problems(settings)
    if found:
        places = {problem.key: _place(problem.key, over) for problem in found}
        edited = dict.fromkeys(place or "conf/" for place in places.values())
        raise UserError(
            "Settings are out of range" if len(found) > 1 else found[0].message,
            where=", ".join(
                key + (f" ({place})" if place else "") for key, place in places.items()
            ),
            found="; ".join(f"{problem.key}={problem.found}" for problem in found),
            expected="; ".join(f"{problem.key}: {problem.expected}" for problem in found),
            fix=f"edit {' and '.join(edited)} and run again",
        )
    return settings


def _place(key: str, over: Sequence[tuple[str, DictConfig]]) -> str:
    """The strongest layer over params.yaml that sets a key, "" where none does."""
    group, _, name = key.rpartition(".")
    for where, layer in reversed(over):
        said = OmegaConf.select(layer, group) if group else layer
        if isinstance(said, DictConfig) and name in said:
            return where
    return ""


def _normalise(settings: Settings) -> None:
    """YAML 1.1 reads on and off as booleans: give the words back."""
    for name in ("loss_chunk", "attention_block", "activation_cache"):
        value = getattr(settings.memory, name)
        if isinstance(value, bool):
            setattr(settings.memory, name, "on" if value else "off")


def as_dict(settings: Settings, groups: Sequence[str] = schema.GROUPS) -> dict[str, Any]:
    """Groups of the settings as plain dictionaries, for fingerprints and reports."""
    return {group: dataclasses.asdict(getattr(settings, group)) for group in groups}
