"""Run a stage and write the settings that it read: `python -m tests.watch <stage> <file>`."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

from stages.core import entry, schema

read: set[str] = set()


def _watch(cls: type, prefix: str) -> None:
    """Note every field of `cls` that is read, under its dotted key."""
    names = {item.name for item in dataclasses.fields(cls)}
    plain = cls.__getattribute__

    def noting(self, name):
        value = plain(self, name)
        if name in names and not dataclasses.is_dataclass(value):
            read.add(prefix + name)
        return value

    cls.__getattribute__ = noting
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.default_factory):
            _watch(item.default_factory, f"{prefix}{item.name}.")


def _stage(name, work, argv=None):
    """`entry.stage`, forgetting what merging and checking the settings read."""

    def watched(settings):
        read.clear()
        work(settings)

    return plain_stage(name, watched, argv)


if __name__ == "__main__":
    stage, file = sys.argv.pop(1), Path(sys.argv.pop(1))
    plain_stage, entry.stage = entry.stage, _stage
    _watch(schema.Settings, "")
    try:
        runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
    finally:
        file.write_text(json.dumps(sorted(read)))
