"""Pictures of the page, from files of results: SVG that is the same for the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.fits import Fit
from stages.core import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "mlx-lm": "#555555",
    "ours, equal rows": "#1f77b4",
    "ours, frozen layers cached": "#d95f02",
}
"""By variant; others take matplotlib's own."""
WIDTH, HEIGHT = 8.0, 3.2
FITTED = 60
"""Points along a fitted curve."""


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw one file of results; appears whole.

    Raises:
        KeyError: There is no picture of such a file.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Text as text keeps the file small; a fixed salt keeps its names the same.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        DRAWN[report["kind"]](report, figure)
        with files.replacing(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})


def _axis(report: Mapping[str, Any], figure: Figure) -> None:
    """Seconds and peak over x, each variant's points with its law as a line."""
    left, right = figure.subplots(1, 2)
    for axes, key, title in (
        (left, "seconds", "seconds of a micro-batch"),
        (right, "above_gb", "peak above the weights, GB"),
    ):
        for name, series in report["series"].items():
            x = np.array([point["x"] for point in series["points"]])
            y = np.array([point[key] for point in series["points"]])
            _points(axes, name, x, y, series["laws"][key])
        _framed(axes, report["label"], title)
    _legend(figure, left)


def _gradients(report: Mapping[str, Any], figure: Figure) -> None:
    """Peak over seconds of each way at each shape, joined along the ways."""
    places = figure.subplots(1, len(report["rows"]), squeeze=False)[0]
    for axes, rows in zip(places, report["rows"], strict=True):
        for length in report["lengths"]:
            cells = [x for x in report["cells"] if x["rows"] == rows and x["length"] == length]
            good = sorted((x for x in cells if x["agrees"]), key=lambda x: x["seconds"])
            axes.plot(
                [x["seconds"] for x in good],
                [x["peak_gb"] for x in good],
                marker="o",
                markersize=4,
                linewidth=0.8,
                label=f"{length} tokens",
            )
        _framed(axes, "seconds of a gradient", "peak above the weights, GB")
        axes.set_title(f"{rows} row(s)", fontsize=9)
    _legend(figure, places[0])


def _reach(report: Mapping[str, Any], figure: Figure) -> None:
    """Validation loss over seconds of training."""
    axes = figure.subplots()
    for name, side in report["sides"].items():
        seconds = [point["seconds"] for point in side["curve"]]
        losses = [point["loss"] for point in side["curve"]]
        axes.plot(seconds, losses, marker="o", markersize=4, label=name, color=_colour(name))
    axes.axhline(report["loss"], color="black", linestyle="--", linewidth=0.8)
    axes.set_xlabel("seconds of training, without validation")
    axes.set_ylabel("validation loss")
    axes.set_xlim(left=0)
    _legend(figure, axes)


def _points(
    axes: Axes, name: str, x: np.ndarray, y: np.ndarray, law: Mapping[str, Any] | None
) -> None:
    (drawn,) = axes.plot(
        x, y, marker="o", markersize=4, linestyle="none", label=name, color=_colour(name)
    )
    if law is not None:
        along = np.linspace(x.min(), x.max(), FITTED)
        axes.plot(along, Fit(**law)(along), color=drawn.get_color(), linewidth=1)


def _framed(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    columns: Sequence = names
    figure.legend(
        handles,
        names,
        loc="outside upper center",
        ncols=max(1, len(columns)),
        frameon=False,
        fontsize=8,
    )


def _colour(name: str) -> str | None:
    return COLOURS.get(name)


DRAWN = {"axis": _axis, "gradients": _gradients, "reach": _reach}
"""By `kind` of a file of results."""
