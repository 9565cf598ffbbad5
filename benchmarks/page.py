"""Write the tables and pictures of docs/benchmarks.md from benchmarks/results:
`python -m benchmarks.page`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a picture between
`<!-- picture: NAME -->` and `<!-- end -->`; NAME is a file of results. What is between other marks,
and all prose, is written by hand. Files of an axis (`axis-layers`) are made anew from its figures.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks import axes, tables
from benchmarks.machine import REPOSITORY, RESULTS
from stages.core import console

PAGE = REPOSITORY / "docs" / "benchmarks.md"
PICTURES = "pictures"
"""Beside the page."""
MARKED = re.compile(r"(<!-- (table|picture): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Fill in every table and picture of the page whose file there is; 1 where one lacks."""
    for name in axes.AXES:
        axes.write(name, RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    for name in names(text, "picture"):
        if _file(name).exists():
            from benchmarks import pictures

            pictures.draw(_report(name), picture(name))
    PAGE.write_text(filled(text), encoding="utf-8")
    for name in missing(text):
        console.warn(f"{_file(name).name} is missing: its place in the page stays as it was")
    return 1 if missing(text) else 0


def filled(text: str) -> str:
    """The page with each table made anew from its file, where there is one."""
    return MARKED.sub(_filled, text)


def names(text: str, kind: str) -> list[str]:
    """The files that the page's tables, or its pictures, are made from."""
    return [name for _, found, name, _ in MARKED.findall(text) if found == kind]


def missing(text: str) -> list[str]:
    """Files that the page names and that are not there."""
    return sorted({name for _, _, name, _ in MARKED.findall(text) if not _file(name).exists()})


def table(name: str) -> str:
    """One file of results as Markdown, and the machine it was taken on."""
    return tables.of(_report(name))


def picture(name: str) -> Path:
    """Where a picture lies."""
    return PAGE.parent / PICTURES / f"{name}.svg"


def _filled(mark: re.Match[str]) -> str:
    begin, kind, name, end = mark.groups()
    if not _file(name).exists():
        return mark[0]
    made = table(name) if kind == "table" else f"![{name}]({PICTURES}/{name}.svg)\n\n"
    return f"{begin}{made}{end}"


def _file(name: str) -> Path:
    return RESULTS / f"{name}.json"


def _report(name: str) -> dict:
    return json.loads(_file(name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
