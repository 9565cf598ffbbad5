"""Every key of the settings with its default and meaning, read from the schema itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap

from omegaconf import DictConfig, OmegaConf

from stages.core.config import schema, settings

WIDTH = 100


def listing() -> str:
    """One paragraph per key: `key=default`, then what it means."""
    defaults = OmegaConf.structured(schema.Settings)
    meanings = _meanings()
    lines = ["keys and their defaults in stages/core/config/schema.py (conf/ sets some of them):"]
    for key in settings.known_keys():
        value = OmegaConf.select(defaults, key)
        if isinstance(value, DictConfig) and len(value):
            continue
        lines.append(f"  {key}={'null' if value is None else value}")
        meaning = meanings.get(key, "")
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _meanings() -> dict[str, str]:
    """Dotted key → the docstring below its field."""
    found: dict[str, str] = {}

    def walk(group: type, prefix: str) -> None:
        words = _field_words(group)
        for item in dataclasses.fields(group):
            key = prefix + item.name
            found[key] = words.get(item.name, "")
            if dataclasses.is_dataclass(item.default_factory):
                walk(item.default_factory, key + ".")

    walk(schema.Settings, "")
    return found


def _field_words(group: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0].body
    words = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            words[field.target.id] = " ".join(str(below.value.value).split())
    return words
