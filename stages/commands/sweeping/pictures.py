"""The pictures of a sweep as inline SVG: parallel coordinates, and loss against each key."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from stages.commands.sweeping.axis import Axis, axis
from stages.report import svg
from stages.report.html import Markup, tag

WIDTH, HEIGHT, TOP, BOTTOM = 920, 340, 46, 24
SIDE = 76
LOSS = "tuned_loss"
LONGEST_TEXT = 18
HALO = "paint-order:stroke;stroke:var(--paper);stroke-width:4px"
"""Keeps a number readable where lines cross it."""


def parallel(table: pd.DataFrame, keys: Sequence[str]) -> Markup:
    """A vertical axis per key and one for the loss, a line per finished point.

    The lower a point's loss, the stronger its line; the lowest stands at the bottom of the last
    axis and is drawn last.
    """
    axes = [axis(key, table[key]) for key in keys]
    axes.append(axis("loss (nats)", table[LOSS]))
    across = svg.Scale(0, len(axes) - 1, SIDE, WIDTH - SIDE)
    up = svg.Scale(0, 1, HEIGHT - BOTTOM, TOP)
    parts: list[Markup] = []
    strength = _strength(table[LOSS])
    for row in np.argsort(-table[LOSS].to_numpy(), kind="stable").tolist():
        heights = np.array([one.places[row] for one in axes])
        x = np.arange(len(axes), dtype=float)
        words = f"{table['experiment'].iloc[row]}: {table[LOSS].iloc[row]:.4f}"
        parts.append(
            tag(
                "path",
                tag("title", words),
                d=svg.path(x, heights, across, up),
                class_="line",
                style=_colour(strength[row]),
            )
        )
    for i, one in enumerate(axes):
        parts += _upright(one, across(i), up, first=i == 0)
    drawing = svg.drawing("Parallel coordinates of all points", WIDTH, HEIGHT, *parts)
    return _figure("Every point", "a line each; the lower the loss, the stronger", drawing)


def against(table: pd.DataFrame, key: str) -> Markup:
    """Loss against the values of one key, a dot per finished point, and the lowest per value."""
    one = axis(key, table[key])
    box = svg.frame((-0.06, 1.06), svg.padded(table[LOSS].to_numpy()), 440, 250)
    parts: list[Markup] = box.axes(key + (" (logarithmic)" if one.kind == "log" else ""), [])
    for place, text in one.marks:
        parts.append(_text(box.across(place), box.up.start + 18, text, "middle"))
    lowest: dict[float, float] = {}
    for place, loss in zip(one.places, table[LOSS], strict=True):
        if not math.isnan(place):
            lowest[place] = min(loss, lowest.get(place, math.inf))
    if one.kind != "each":
        x = np.array(sorted(lowest))
        y = np.array([lowest[place] for place in x.tolist()])
        parts.append(tag("path", d=svg.path(x, y, box.across, box.up), class_="line s1 faint"))
    for row, (place, loss) in enumerate(zip(one.places, table[LOSS], strict=True)):
        if math.isnan(place):
            continue
        words = f"{table['experiment'].iloc[row]}: {loss:.4f}"
        spot = {"cx": f"{box.across(place):.1f}", "cy": f"{box.up(loss):.1f}"}
        best = "s1" if loss == lowest[place] else "s0 dot"
        parts.append(tag("circle", tag("title", words), **spot, r=4, class_=best))
    title = f"Loss against {key}"
    return _figure(key, "loss in nats", svg.drawing(title, box.width, box.height, *parts))


def _upright(one: Axis, x: float, up: svg.Scale, first: bool) -> list[Markup]:
    """An axis of the parallel coordinates: its name above, its values beside."""
    found = [
        tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=up.start, y2=up.end, class_="grid"),
        _text(x, TOP - 22, _short(one.name.split(".")[-1]), "middle"),
    ]
    side, away = ("end", -7) if first else ("start", 7)
    for place, text in one.marks:
        y = up(place)
        found.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, class_="s0"))
        found.append(_text(x + away, y + 4, _short(text), side, style=HALO))
    return found


def _strength(losses: pd.Series) -> list[float]:
    """1 for the lowest loss down to 0 for the highest, by rank."""
    ranks = losses.rank(method="min").to_numpy() - 1
    return (1 - ranks / max(1, len(losses) - 1)).tolist()


def _colour(strength: float) -> str:
    share = round(100 * strength)
    return (
        f"stroke:color-mix(in oklab,var(--accent) {share}%,var(--base));"
        f"stroke-opacity:{0.25 + 0.75 * strength**2:.2f}"
    )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _figure(title: str, unit: str, drawing: Markup) -> Markup:
    return tag("figure", tag("figcaption", tag("b", title), " ", tag("span", unit)), drawing)


def _text(x: float, y: float, text: str, anchor: str, **more: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **more)
