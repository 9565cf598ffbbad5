"""Hydra's composition of conf/ on the schema, and its errors in the words of the settings.

The steps are those of DVC's own `dvc.utils.hydra.compose_and_dump` (compose, resolve, to_yaml), so
that params.yaml has the same bytes whoever writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stages.compose import markers
from stages.core.config import settings
from stages.core.config.schema import Settings
from stages.core.errors import UserError

CONFIG = "config"


def compose(conf: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose `conf` with overrides in Hydra's grammar and check every value.

    Args:
        conf: The folder that holds config.yaml.
        overrides: `key=value`, `group=choice`, `+key=value`.

    Raises:
        UserError: A key is unknown (the nearest is named), a type wrong, a value out of range or
            `???`, a group's choice missing, or a file no YAML.
    """
    if not (conf / f"{CONFIG}.yaml").exists():
        raise UserError(
            "There are no settings here",
            where=str(conf / f"{CONFIG}.yaml"),
            fix="run from the project's root, which holds conf/config.yaml",
        )
    try:
        with initialize_config_dir(str(conf.absolute()), version_base=None):
            composition = hydra_compose(config_name=CONFIG, overrides=list(overrides))
            markers.refuse(conf, CONFIG, overrides)
        OmegaConf.resolve(composition)
    except UnicodeDecodeError as error:
        raise _not_utf8(conf) from error
    # Hydra lets plain errors through for words it cannot make sense of, such as `=3`.
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        AttributeError,
        AssertionError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise _user_error(error, overrides) from error
    check(composition, "conf/")
    return composition


def _not_utf8(conf: Path) -> UserError:
    """Name the file and the line that is not UTF-8."""
    for file in sorted(conf.rglob("*.yaml")):
        for i, line in enumerate(file.read_bytes().split(b"\n")):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return UserError(
                    "A settings file is not UTF-8",
                    where=f"conf/{file.relative_to(conf).as_posix()}:{i + 1}",
                    found=error,
                    expected="UTF-8",
                    fix="save the file as UTF-8",
                )
    return UserError("A settings file is not UTF-8", where=str(conf), fix="save it as UTF-8")


def check(values: DictConfig, where: str) -> None:
    """Check keys, types and ranges of a composition.

    Raises:
        UserError: As `stages.core.config.settings.load_settings`.
    """
    # Plain values: a composition carries the schema's types, and merging those lets `+key=` pass.
    plain = OmegaConf.create(OmegaConf.to_container(values))
    merged = settings.merge(OmegaConf.structured(Settings), plain, where)
    settings.to_settings(merged)


def text(composition: DictConfig) -> str:
    """The bytes of params.yaml, as DVC writes them."""
    return OmegaConf.to_yaml(composition)


def leaves(values: DictConfig) -> dict[str, Any]:
    """Dotted key → value, for every key of the schema; free mappings and lists stay whole."""
    groups = {name for name in settings.known_keys() if _is_group(name)}
    flat: dict[str, Any] = {}

    def walk(mapping: dict[str, Any], prefix: str) -> None:
        for name, value in mapping.items():
            key = prefix + str(name)
            if isinstance(value, dict) and key in groups:
                walk(value, key + ".")
            else:
                flat[key] = value

    walk(OmegaConf.to_container(values), "")
    return flat


@functools.cache
def _is_group(key: str) -> bool:
    return any(name.startswith(key + ".") for name in settings.known_keys())


def _user_error(error: Exception, overrides: Sequence[str]) -> UserError:
    """The message for what Hydra or OmegaConf refused: the key first, where there is one."""
    where = "conf/ or the command line" if overrides else "conf/"
    for cause in _chain(error):
        key = str(getattr(cause, "full_key", None) or "")
        if not key or not isinstance(cause, OmegaConfBaseException):
            continue
        free = next((name for name in _free_mappings() if key.startswith(name + ".")), None)
        if free:
            return UserError(
                f"A new key below {free} needs a plus sign",
                where=where,
                found=key,
                fix=f"write `+{free}.…=value`, or set it in conf/",
            )
        return settings.schema_error(cause, _file(error) or where)
    return UserError(
        "The settings cannot be composed",
        where=where,
        found=_without_search_path(str(error)),
        fix="correct that line; `python -m stages.compose --help` lists every key",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _free_mappings() -> list[str]:
    """Keys whose own keys nobody can list: `data.columns`, `train.optimizer_config`."""
    defaults = OmegaConf.structured(Settings)
    known = settings.known_keys()
    return [
        key
        for key in known
        if isinstance(OmegaConf.select(defaults, key), DictConfig) and not _is_group(key)
    ]


def _file(error: Exception) -> str:
    """`conf/train/lora.yaml` out of Hydra's "In 'train/lora': …", "" where it names none."""
    first = str(error).splitlines()[0]
    return f"conf/{first.split(chr(39))[1]}.yaml" if first.startswith("In '") else ""


def _without_search_path(message: str) -> str:
    kept = message.split("Config search path:", maxsplit=1)[0]
    return " ".join(line.strip() for line in kept.splitlines() if line.strip())
