"""Run a stage and write the settings that it read: `python -m tests.watch <stage> <file>`.

Reads by code that can't change a result (pyproject.toml lists it) do not count.
"""

import dataclasses
import json
import runpy
import sys
import tomllib
from pathlib import Path

from stages.core import entry
from stages.core.config import schema

ROOT = Path.cwd()
NO_RESULT = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["samestep"]["no-result"]
read: set[str] = set()
watched: set[int] = set()


def _watch(cls: type, prefix: str) -> None:
    """Note every field that is read of the stage's own settings, under its dotted key."""
    names = {item.name for item in dataclasses.fields(cls)}
    plain = cls.__getattribute__

    def noting(self, name):
        value = plain(self, name)
        leaf = name in names and not dataclasses.is_dataclass(value)
        if leaf and id(self) in watched and not _by_code_without_result():
            read.add(prefix + name)
        return value

    cls.__getattribute__ = noting
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.default_factory):
            _watch(item.default_factory, f"{prefix}{item.name}.")


def _by_code_without_result() -> bool:
    frame = sys._getframe(2)
    while frame and not frame.f_code.co_filename.endswith("core/entry.py"):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).as_posix() in NO_RESULT:
            return True
        frame = frame.f_back
    return False


def _objects(value):
    yield value
    for item in dataclasses.fields(value):
        below = getattr(value, item.name)
        if dataclasses.is_dataclass(below):
            yield from _objects(below)


def _stage(name, work, argv=None):
    """`entry.stage`, watching from the moment when the settings are merged and checked."""

    def watching(settings):
        watched.update([id(one) for one in _objects(settings)])
        work(settings)

    return plain_stage(name, watching, argv)


if __name__ == "__main__":
    stage, file = sys.argv.pop(1), Path(sys.argv.pop(1))
    plain_stage, entry.stage = entry.stage, _stage
    _watch(schema.Settings, "")
    try:
        runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
    finally:
        file.write_text(json.dumps(sorted(read)))
