"""`???`, Hydra's word for a value still to come; laid on the schema it is the default, silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from stages.core.errors import UserError

MARKER = "???"


def refuse(conf: Path, config: str, overrides: Sequence[str]) -> None:
    """Refuse keys that the files of a composition leave open. Hydra is initialized on `conf`.

    Args:
        conf: The folder of the settings.
        config: Name of the primary file.
        overrides: Choose the files; a value that they give does not count, since params.yaml is
            compared with conf/ alone.

    Raises:
        UserError: The last file that says something about a key says `???`.
    """
    if not any(MARKER.encode() in file.read_bytes() for file in conf.rglob("*.yaml")):
        return
    loader = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list(config, list(overrides), RunMode.RUN)
    open_keys: dict[str, Path] = {}
    for one in listed.defaults:
        file = conf / f"{one.config_path}.yaml"
        if not file.exists():
            continue
        values = OmegaConf.to_container(OmegaConf.load(file))
        for key, value in _leaves(values, one.package or ""):
            if value == MARKER:
                open_keys[key] = file
            else:
                open_keys.pop(key, None)
    if open_keys:
        places = (f"conf/{file.relative_to(conf).as_posix()}" for file in open_keys.values())
        raise UserError(
            "Settings have no value",
            where=", ".join(dict.fromkeys(places)),
            found=", ".join(f"{key}={MARKER}" for key in open_keys),
            expected="a value for each",
            fix="write one there",
        )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, below in value.items():
        yield from _leaves(below, f"{key}.{name}" if key else str(name))
