"""What a person sees: lines, warnings, tables and progress. Nothing here can change a result.

Everything goes to stderr, so that `--json` output on stdout stays clean. On a terminal long work
shows a bar; elsewhere (logs, CI, DVC) a plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_LINES = 5.0

_console = Console(stderr=True, highlight=False, soft_wrap=True)


def quiet() -> None:
    """Print errors only from now on: another process of the same run does the talking."""
    _console.quiet = True


def say(text: str) -> None:
    """Print one line of information."""
    _console.print(text, markup=False)


def warn(text: str) -> None:
    """Print one line that a person should read."""
    _console.print(f"warning: {text}", style="yellow", markup=False)


def fail(lines: Sequence[str]) -> None:
    """Print an error as the last block on stderr."""
    _console.quiet = False
    _console.print("\nerror: " + "\n".join(lines), style="red", markup=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; every column after the first is aligned to the right."""
    _console.print(_table(title, columns, rows))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    view = Table(title=Text(title), title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        view.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        view.add_row(*(Text(str(cell)) for cell in row))
    return view


def side_by_side(title: str, texts: Sequence[tuple[str, str]]) -> None:
    """Print texts beside each other under their headings, wrapped to the width of the terminal."""
    view = Table(title=Text(title), title_justify="left", title_style="bold", expand=True)
    for name, _ in texts:
        view.add_column(name, ratio=1, overflow="fold")
    view.add_row(*(Text(text) for _, text in texts))
    _console.print(view, soft_wrap=False)


def is_terminal() -> bool:
    """Whether a person watches: lines may be drawn anew."""
    return _console.is_terminal


@contextlib.contextmanager
def board(title: str, columns: Sequence[str]) -> Iterator[Callable[..., None]]:
    """Give a function `show(rows)` that draws one table anew, for a terminal only."""
    with Live(console=_console, auto_refresh=False, transient=True) as live:

        def show(rows: Sequence[Sequence[object]]) -> None:
            live.update(_table(title, columns, rows), refresh=True)

        yield show


@contextlib.contextmanager
def progress(label: str, total: int | None, unit: str = "rows") -> Iterator[Callable[..., None]]:
    """Give a function `advance(n=1, note="")` that moves a bar or prints a line now and then.

    Args:
        label: What is being done ("tokenize train").
        total: How many steps make the whole, or None where nobody knows yet.
        unit: What is counted.
    """
    shown = _bar(label, total, unit) if _console.is_terminal else _lines(label, total, unit)
    with shown as advance:
        yield advance


@contextlib.contextmanager
def _bar(label: str, total: int | None, unit: str) -> Iterator[Callable[..., None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + "  {task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_console) as bar:
        task = bar.add_task(label, total=total, note="")

        def advance(n: int = 1, note: str | None = None) -> None:
            bar.update(task, advance=n, **({} if note is None else {"note": note}))

        yield advance


@contextlib.contextmanager
def _lines(label: str, total: int | None, unit: str) -> Iterator[Callable[..., None]]:
    started = last = time.monotonic()
    done = 0
    of = "" if total is None else f" of {total}"

    def advance(n: int = 1, note: str | None = None) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            say(f"{label}: {done}{of} {unit}, {now - started:.0f} s{'  ' + note if note else ''}")

    yield advance
    took = time.monotonic() - started
    if took >= SECONDS_BETWEEN_LINES:
        say(f"{label}: {done} {unit} in {took:.1f} s")
