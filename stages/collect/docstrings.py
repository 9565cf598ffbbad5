"""The built-in corpus: the source of a Python function → its docstring.

Rows are cut as text out of the installed files of a few pure-Python packages that are pinned for
this alone (pyproject, `[tool.samestep.corpus]`); nothing of them is imported or run. Modules are
taken in the order of a hash of their path, first for test, then valid, then train: no file of one
split stands in another, and the corpus is the same for everyone. `data.seed` and `data.shares` do
not apply to it.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from stages.collect.blocks import Ready
from stages.core.errors import UserError

PATH = "builtin:docstrings"
INSTRUCTION = "Write the docstring of this Python function."

LEFT_OUT = ("tests", "testing", "benchmarks", "_antlr", "autolev", "deprecated")
ROWS_PER_MODULE = 3
SHORTEST_DOCSTRING = 24
LONGEST_USUAL = 1_050
LONG = (2_400, 12_000)
"""Characters of a row: up to LONGEST_USUAL, and a long tail within LONG."""


@dataclass(frozen=True)
class Quota:
    """Rows of a split, and how many of them are from the long tail."""

    rows: int
    long: int


QUOTAS = {"test": Quota(96, 4), "valid": Quota(64, 2), "train": Quota(672, 28)}


@dataclass(frozen=True)
class Function:
    """A function without its docstring, and the docstring; `line` is that of `def`."""

    line: int
    code: str
    docstring: str

    @property
    def characters(self) -> int:
        """Length of both."""
        return len(self.code) + len(self.docstring)

    def row(self) -> dict[str, str]:
        """As a row of the form prompt/completion."""
        return {
            "prompt": f"{INSTRUCTION}\n\n```python\n{self.code}\n```",
            "completion": self.docstring,
        }


def rows(pyproject: Path) -> dict[str, list[tuple[str, Ready]]]:
    """The corpus: split → (module, its rows), train first.

    Args:
        pyproject: The project's pyproject.toml, which names packages and versions.

    Raises:
        UserError: A package is missing or has another version.
    """
    modules = iter(sorted(_modules(pyproject), key=lambda module: _hash(module[0])))
    seen: set[str] = set()
    found = {split: _fill(modules, quota, seen) for split, quota in QUOTAS.items()}
    return {split: found[split] for split in ("train", "valid", "test")}


def _fill(
    modules: Iterator[tuple[str, Path]], quota: Quota, seen: set[str]
) -> list[tuple[str, Ready]]:
    """Take modules until a split is full; the last one is cut short, never shared."""
    filled: list[tuple[str, Ready]] = []
    count = long = 0
    while count < quota.rows:
        name, path = next(modules)
        functions = []
        for function in _by_hash(functions_of(path.read_text(encoding="utf-8")), name):
            is_long = LONG[0] <= function.characters <= LONG[1]
            usual = function.characters <= LONGEST_USUAL
            full = len(functions) == min(ROWS_PER_MODULE, quota.rows - count)
            if full or function.code in seen or not (usual or (is_long and long < quota.long)):
                continue
            functions.append(function)
            seen.add(function.code)
            long += is_long
        functions.sort(key=lambda function: function.line)
        if functions:
            lines = [function.line for function in functions]
            filled.append((name, Ready(lines, [function.row() for function in functions])))
            count += len(functions)
    return filled


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _by_hash(functions: list[Function], module: str) -> list[Function]:
    return sorted(functions, key=lambda function: _hash(f"{module}\n{function.code}"))


def _modules(pyproject: Path) -> Iterator[tuple[str, Path]]:
    """(path inside the package, path on the disk) of every module that may be taken."""
    for name, version in _pinned(pyproject).items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise _other_package(name, version, "not installed") from None
        if found.version != version:
            raise _other_package(name, version, found.version)
        for file in found.files or ():
            path = file.as_posix()
            if path.endswith(".py") and not any(word in path for word in LEFT_OUT):
                yield path, Path(str(found.locate_file(file)))


def _pinned(pyproject: Path) -> dict[str, str]:
    try:
        with open(pyproject, "rb") as file:
            return tomllib.load(file)["tool"]["samestep"]["corpus"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            "pyproject.toml does not say which packages make the corpus",
            where=str(pyproject),
            found=repr(error),
            expected="[tool.samestep.corpus] with name = version",
            fix="run from the project's root",
        ) from error


def _other_package(name: str, expected: str, found: str) -> UserError:
    return UserError(
        f"The corpus needs {name} {expected}, whose source text it is cut from",
        where="pyproject.toml, [tool.samestep.corpus]",
        found=found,
        expected=expected,
        fix="make setup",
    )


def functions_of(source: str) -> list[Function]:
    """Every function with a docstring and code behind it, cut out of a module's text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        tree = ast.parse(source)
    lines = source.split("\n")
    defs = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = [_cut(node, lines) for node in defs]
    return [function for function in found if function is not None]


def _cut(node: ast.FunctionDef, lines: list[str]) -> Function | None:
    """Take the docstring's lines out of a function's lines; None where that cannot be done."""
    first, *rest = node.body
    if not rest or not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    start, end, last = first.lineno, first.end_lineno or 0, node.end_lineno or 0
    alone = lines[start - 1][: first.col_offset].isspace() and rest[0].lineno > end
    docstring = clean(first.value.value) if isinstance(first.value.value, str) else ""
    if not alone or len(docstring) < SHORTEST_DOCSTRING:
        return None
    indent = lines[node.lineno - 1][: node.col_offset]
    kept = [*lines[node.lineno - 1 : start - 1], *lines[end:last]]
    code = "\n".join(line.removeprefix(indent).rstrip() for line in kept)
    return Function(node.lineno, code, docstring)


def clean(docstring: str) -> str:
    """A docstring without the indentation of its place (PEP 257), alike on every Python."""
    first, *others = docstring.expandtabs().split("\n")
    indents = [len(line) - len(line.lstrip()) for line in others if line.strip()]
    indent = min(indents, default=0)
    lines = [first.strip(), *(line[indent:].rstrip() for line in others)]
    return "\n".join(lines).strip("\n")
