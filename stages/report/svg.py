"""Charts as inline SVG: axes with round ticks, lines, bars, legends. Colours come from the page.

Coordinates are in pixels of the drawing's own box; the page scales it to the width it has. The
page's style sheet colours the classes (`s0`, `s1`, `grid`), so one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.report.html import Markup, tag

SMALL = 1e-3
"""Numbers below it are written with a power of ten: 1e-4 beside 7.5e-5, not 0.0001."""
MOST_POINTS = 500
"""Points drawn of one line; longer ones keep the lowest and highest of each stretch."""


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels.

    Attributes:
        low, high: Values at the ends.
        start, end: Pixels of the ends.
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Line:
    """One series: where either value is not finite the line breaks.

    Attributes:
        name: For the legend; "" for none.
        x, y: Values of equal length, x ascending.
        class_: `s0`, `s1`, … and, beside it, `faint`, `dashed` or `dots`.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    class_: str = "s0"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= 0.75 * rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def label(value: float) -> str:
    """A number for an axis: four digits at most, a true minus (0.25, 2e-4, −1.5, 12k, 3M)."""
    sign = "−" if value < 0 else ""
    if 0 < abs(value) < SMALL:
        digits, power = f"{abs(value):.3e}".split("e")
        return f"{sign}{float(digits):g}e{int(power)}"
    size, letter = next(
        (one for one in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if abs(value) >= one[0]), (1, "")
    )
    text = f"{abs(value) / (1e3 if letter == 'k' else size):.4g}"
    return f"{sign}{text}{letter}"


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: of each stretch the lowest and the highest, in their order."""
    if len(x) <= most:
        return x, y
    kept: list[int] = []
    for part in np.array_split(np.arange(len(x)), most // 2):
        finite = part[np.isfinite(y[part])]
        if finite.size:
            kept += sorted({int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])})
        else:
            kept.append(int(part[0]))
    return x[kept], y[kept]


def path(x: np.ndarray, y: np.ndarray, across: Scale, up: Scale) -> str:
    """The `d` of a line through all finite points, broken where one is not finite."""
    parts, pen_down = [], False
    for px, py in zip(x.tolist(), y.tolist(), strict=True):
        if not (math.isfinite(px) and math.isfinite(py)):
            pen_down = False
            continue
        parts.append(f"{'L' if pen_down else 'M'}{across(px):.1f} {up(py):.1f}")
        pen_down = True
    return "".join(parts)


@dataclass(frozen=True)
class Frame:
    """The box of a chart with both axes.

    Attributes:
        width, height: The whole drawing.
        across, up: The scales inside the margins.
    """

    width: int
    height: int
    across: Scale
    up: Scale

    def axes(self, x_label: str, x_ticks: Sequence[float], y_count: int = 5) -> list[Markup]:
        """Horizontal grid lines with their numbers, the numbers below, and the label of x."""
        left, right = self.across.start, self.across.end
        bottom = self.up.start
        found = []
        for value in ticks(self.up.low, self.up.high, y_count):
            y = f"{self.up(value):.1f}"
            found.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
            found.append(_text(left - 8, float(y) + 4, label(value), "end"))
        for value in x_ticks:
            found.append(_text(self.across(value), bottom + 18, label(value), "middle"))
        found.append(_text(right, bottom + 34, x_label, "end", "axis"))
        return found


def frame(
    x: tuple[float, float], y: tuple[float, float], width: int = 440, height: int = 250
) -> Frame:
    """A frame for values from x[0] to x[1] and y[0] to y[1], a flat range opened a little."""
    x_low, x_high = _opened(*x)
    y_low, y_high = _opened(*y)
    return Frame(
        width,
        height,
        across=Scale(x_low, x_high, 58, width - 14),
        up=Scale(y_low, y_high, height - 42, 14),
    )


def padded(values: np.ndarray, from_zero: bool = False) -> tuple[float, float]:
    """The range of the finite values with room above and below; (0, 1) where there are none."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if from_zero:
        return 0.0, high * 1.08 if high > 0 else 1.0
    room = 0.06 * (high - low)
    return low - room, high + room


def drawing(title: str, width: int, height: int, *parts: object, class_: str = "chart") -> Markup:
    """An SVG picture with a name that a screen reader says."""
    return tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        class_=class_,
        style=f"aspect-ratio:{width}/{height}",
    )


def line_chart(title: str, lines: Sequence[Line], box: Frame, x_label: str = "update") -> Markup:
    """Lines over a whole number in a frame; dots where a series has the class `dots`."""
    whole = [x for x in ticks(box.across.low, box.across.high) if x == int(x)]
    parts: list[object] = box.axes(x_label, whole)
    for line in lines:
        x, y = thinned(line.x, line.y)
        parts.append(tag("path", d=path(x, y, box.across, box.up), class_=f"line {line.class_}"))
        if "dots" in line.class_ or len(x) == 1:
            parts += _dots(x, y, box, line.class_)
    return drawing(title, box.width, box.height, *parts)


def legend(lines: Sequence[Line]) -> Markup:
    """The named series with their colours, as text below a chart."""
    items = [
        tag("span", tag("i", class_=f"key {line.class_}"), line.name) for line in lines if line.name
    ]
    return tag("p", *items, class_="legend")


def _dots(x: np.ndarray, y: np.ndarray, box: Frame, class_: str) -> list[Markup]:
    return [
        tag(
            "circle",
            tag("title", f"{label(px)}: {py:.4g}"),
            cx=f"{box.across(px):.1f}",
            cy=f"{box.up(py):.1f}",
            r=3.2,
            class_=class_,
        )
        for px, py in zip(x.tolist(), y.tolist(), strict=True)
        if math.isfinite(py)
    ]


def _opened(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 0.5
    return low - room, high + room


def _text(x: float, y: float, text: str, anchor: str, class_: str | None = None) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=class_)
