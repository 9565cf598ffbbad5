"""Commands that a person runs: `python -m stages <command>`."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.core import console
from stages.core.config.settings import nearest

COMMANDS = Path(__file__).parent / "commands"
USAGE = "usage: python -m stages <command> [arguments]   (<command> --help tells more)"


def main(argv: Sequence[str]) -> int:
    """Find the command and hand the rest of the line to its `main(argv) -> int`."""
    names = commands()
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, "", *_listing(names), sep="\n")
        return 0 if argv else 2
    name, rest = argv[0], list(argv[1:])
    if name not in names:
        close = nearest(name, list(names))
        console.fail(
            [
                "There is no such command",
                f"  found:    {name}",
                f"  expected: one of {', '.join(names)}",
                f"  to do:    {f'python -m stages {close}' if close else USAGE}",
            ]
        )
        return 2
    module = importlib.import_module(f"stages.commands.{names[name].stem}")
    return module.main(rest)


def commands() -> dict[str, Path]:
    """Command name → its file; `stages/commands/clean_cache.py` is `clean-cache`."""
    files = sorted(COMMANDS.glob("*.py"))
    return {file.stem.replace("_", "-"): file for file in files if not file.stem.startswith("_")}


def _listing(names: dict[str, Path]) -> list[str]:
    """One line per command: the first line of its module docstring. Imports none of them."""
    return [f"  {name:<12} {_first_line(file)}" for name, file in names.items()]


def _first_line(file: Path) -> str:
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return words.splitlines()[0] if words else ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
