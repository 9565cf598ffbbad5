"""The charts of the page, each from one table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from stages.report import svg
from stages.report.html import Markup, join, tag

MOST_DOTS = 600
"""Rows drawn in the scatter; of more, every n-th."""


FEWEST_SMOOTHED = 50
"""Updates from which on the running median is drawn."""


def loss(history: pd.DataFrame, valid: pd.DataFrame) -> Markup:
    """Training loss per update, its running median, and validation; wide and narrow drawing."""
    x, y = column(history, "update"), column(history, "loss")
    smoothed = len(y) >= FEWEST_SMOOTHED
    lines = [svg.Line("each update", x, y, "s0 faint" if smoothed else "s0")]
    if smoothed:
        lines.append(svg.Line("running median", x, running_median(y), "s0"))
    if len(valid):
        marks = (column(valid, "update"), column(valid, "loss"))
        lines.append(svg.Line("validation", *marks, "s1 dots"))
    low, high = svg.padded(np.concatenate([line.y for line in lines]))
    span = (float(min(x.min(initial=0), 0)), float(x.max(initial=1)))
    drawings = [
        tag(
            "div",
            svg.line_chart("Loss over updates", lines, svg.frame(span, (low, high), width, height)),
            class_=class_,
        )
        for class_, width, height in (("wide", 920, 330), ("narrow", 440, 280))
    ]
    return _figure("Loss", "nats per target", join([*drawings, svg.legend(lines)]))


def over_updates(title: str, table: pd.DataFrame, name: str, unit: str) -> Markup:
    """One column over updates, from zero."""
    line = svg.Line("", column(table, "update"), column(table, name), "s1")
    box = svg.frame(_span(line.x), svg.padded(line.y, from_zero=True))
    return _figure(title, unit, svg.line_chart(title, [line], box))


def memory(telemetry: pd.DataFrame, plan: dict[str, Any]) -> Markup:
    """Memory of the process over updates, and the plan's predicted peak as a dashed line."""
    x = column(telemetry, "update")
    named = {"peak_gb": ("MLX, peak", "s1"), "active_gb": ("MLX, after the update", "s2")}
    named |= {"cache_gb": ("allocator cache", "s3"), "footprint_gb": ("whole process", "s0")}
    lines = [
        svg.Line(label, x, column(telemetry, name), class_)
        for name, (label, class_) in named.items()
        if name in telemetry and telemetry[name].notna().any()
    ]
    predicted = plan.get("predicted_peak_gb")
    if predicted is not None and len(x):
        ends = np.array([x[0], x[-1]])
        flat = np.array([predicted, predicted], float)
        lines.append(svg.Line("predicted peak", ends, flat, "s1 dashed"))
    values = np.concatenate([line.y for line in lines]) if lines else np.zeros(0)
    box = svg.frame(_span(x), svg.padded(values, from_zero=True))
    chart = svg.line_chart("Memory over updates", lines, box)
    return _figure("Memory", "GB", join([chart, svg.legend(lines)]))


def interval(change: float, low: float, high: float) -> Markup:
    """The change with its interval, against the line of no change."""
    width, height = 440, 96
    ends = (min(low, 0.0), max(high, 0.0))
    room = 0.08 * (ends[1] - ends[0]) or 0.01
    scale = svg.Scale(ends[0] - room, ends[1] + room, 16, width - 16)
    at = {name: f"{scale(value):.1f}" for name, value in (("low", low), ("high", high))}
    zero, middle = f"{scale(0):.1f}", f"{scale(change):.1f}"
    marks = [
        tag("line", x1=16, x2=width - 16, y1=66, y2=66, class_="grid"),
        tag("line", x1=zero, x2=zero, y1=22, y2=66, class_="zero"),
        tag("text", "no change", x=zero, y=14, text_anchor=_side(float(zero), width)),
        tag("line", x1=at["low"], x2=at["high"], y1=44, y2=44, class_="whisker s1"),
        *(tag("line", x1=x, x2=x, y1=38, y2=50, class_="whisker s1") for x in at.values()),
        tag("circle", cx=middle, cy=44, r=5, class_="s1"),
    ]
    for value in svg.ticks(scale.low, scale.high, 5):
        text = svg.label(value)
        marks.append(tag("text", text, x=f"{scale(value):.1f}", y=84, text_anchor="middle"))
    title = "Change of the loss with its 95% interval"
    return _figure("Change of the loss", "nats", svg.drawing(title, width, height, *marks))


def scatter(rows: pd.DataFrame) -> Markup:
    """Every row's base loss across and tuned loss up; below the diagonal is better."""
    step = -(-len(rows) // MOST_DOTS) or 1
    shown = rows.iloc[::step]
    x, y = column(shown, "base_loss"), column(shown, "tuned_loss")
    low, high = svg.padded(np.concatenate([x, y]))
    low = max(0.0, low)
    box = svg.frame((low, high), (low, high), 440, 340)
    corner = [(box.across(v), box.up(v)) for v in (box.across.low, box.across.high)]
    (x1, y1), (x2, y2) = corner
    parts: list[object] = box.axes("base loss", svg.ticks(low, high, 6), y_count=6)
    parts.append(tag("text", "tuned loss", x=f"{x1 + 6:.1f}", y=f"{y2 + 4:.1f}", class_="axis"))
    parts.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="zero"))
    for row, px, py in zip(shown["row"], x.tolist(), y.tolist(), strict=True):
        name = tag("title", f"row {row}: {px:.3f} to {py:.3f}")
        spot = {"cx": f"{box.across(px):.1f}", "cy": f"{box.up(py):.1f}"}
        parts.append(tag("circle", name, **spot, r=3, class_="s1 dot"))
    note = "by row; below the line: better"
    if step > 1:
        note += f"; one row in {step} is drawn"
    title = "Tuned against base loss, row by row"
    return _figure("Tuned against base loss", note, svg.drawing(title, 440, 340, *parts))


def dumbbell(base: float, tuned: float, low: float, high: float) -> Markup:
    """Base and tuned on one line, for a table's cell."""
    scale = svg.Scale(low, high if high > low else low + 1, 8, 132)
    a, b = f"{scale(base):.1f}", f"{scale(tuned):.1f}"
    return svg.drawing(
        f"{base:.3f} to {tuned:.3f}",
        140,
        20,
        tag("line", x1=a, x2=b, y1=10, y2=10, class_="whisker s1"),
        tag("circle", cx=a, cy=10, r=5.5, class_="ring"),
        tag("circle", cx=b, cy=10, r=4, class_="s1"),
        class_="mini",
    )


def running_median(values: np.ndarray, most: int = 51) -> np.ndarray:
    """The median of the values around each one: an odd window, a tenth of the run, at most 51."""
    window = min(most, max(3, len(values) // 10 | 1))
    return (
        pd.Series(values).rolling(window, center=True, min_periods=1).median().to_numpy(np.float64)
    )


def column(table: pd.DataFrame, name: str) -> np.ndarray:
    """A column as float64, empty where the table lacks it."""
    return table[name].to_numpy(np.float64) if name in table else np.zeros(0)


def _figure(title: str, unit: str, chart: Markup) -> Markup:
    caption = tag("figcaption", tag("b", title), " ", tag("span", unit))
    return tag("figure", caption, chart)


def _span(x: np.ndarray) -> tuple[float, float]:
    return float(min(x.min(initial=0), 0)), float(x.max(initial=1))


def _side(x: float, width: int) -> str:
    return "start" if x < 60 else "end" if x > width - 60 else "middle"
