"""All points of a running sweep: a table drawn anew on a terminal, lines of news elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from stages.commands.sweeping import state
from stages.commands.sweeping.points import Point, Sweep
from stages.commands.sweeping.state import State
from stages.core import console

SECONDS_BETWEEN_LOOKS = 0.5
LONGEST_NOTE = 60
COLUMNS = ("point", "state", "stage", "loss (nats)", "now")


@contextlib.contextmanager
def shown(sweep: Sweep, points: Sequence[Point] | None) -> Iterator[None]:
    """Show the points from a thread of its own while the block runs."""
    over = threading.Event()
    watch = _on_terminal if console.is_terminal() else _as_lines
    thread = threading.Thread(target=watch, args=(sweep, points, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def current(sweep: Sweep, points: Sequence[Point] | None, since: float) -> list[State]:
    """The states of the points asked for (where none are known before: of all that began since).

    Args:
        since: Seconds since 1970; a state that is older and not done counts as waiting.
    """
    if points is None:
        return [one for one in state.all_states(sweep.folder) if one.started >= since]
    found = []
    for point in points:
        known = state.read(sweep.folder, point.key)
        if known is None or (known.state != state.DONE and known.started < since):
            known = State(point.key, point.label, point.values)
        found.append(known)
    return found


def _on_terminal(sweep: Sweep, points: Sequence[Point] | None, over: threading.Event) -> None:
    began = time.time()
    with console.board(f"sweep {sweep.name}", COLUMNS) as show:
        while True:
            last = over.wait(SECONDS_BETWEEN_LOOKS)
            show([_row(one) for one in current(sweep, points, began)])
            if last:
                return


def _as_lines(sweep: Sweep, points: Sequence[Point] | None, over: threading.Event) -> None:
    began, told = time.time(), {}
    while True:
        last = over.wait(SECONDS_BETWEEN_LOOKS)
        states = current(sweep, points, began)
        ended = sum(one.state in state.ENDED for one in states)
        for one in states:
            news = _news(one)
            if news and told.get(one.key) != news:
                told[one.key] = news
                of = "" if points is None else f" of {len(points)}"
                console.say(f"{one.label}: {news}  ({ended}{of} ended)")
        if last:
            return


def _news(one: State) -> str:
    """What is worth a line: a new stage or an end."""
    if one.state == state.RUNNING:
        return one.stage
    if one.state == state.DONE:
        return f"done, loss {one.metrics['tuned']['loss']:.4f}"
    return f"failed: {one.reason}" if one.state == state.FAILED else ""


def _row(one: State) -> tuple[str, ...]:
    loss = f"{one.metrics['tuned']['loss']:.4f}" if one.metrics else ""
    note = one.reason if one.state == state.FAILED else one.note
    running = one.state == state.RUNNING
    shown = note if running or one.state == state.FAILED else ""
    if len(shown) > LONGEST_NOTE:
        shown = shown[: LONGEST_NOTE - 1] + "…"
    return one.label, one.state, one.stage if running else "", loss, shown
