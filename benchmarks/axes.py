"""What one axis shows: the figures of its values side by side, and laws of growth. No MLX.

A group of figures (`layers-4.json`, `layers-8.json`, …) makes `axis-layers.json`; `python -m
benchmarks` writes it after the group, `python -m benchmarks.page` again from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import fits
from stages.core import files

SMOLLM2_LAYERS = 30
"""Of files that do not say how many layers -1 means."""


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        prefix: Of its files of results.
        label: Of x.
        x: From the summaries of a variant and of mlx-lm's.
        square: Whether b·x² is tried.
    """

    prefix: str
    label: str
    x: Callable[[Mapping[str, Any], Mapping[str, Any]], float]
    square: bool = False


def _layers(found: Mapping[str, Any], _base: Mapping[str, Any]) -> float:
    asked = found["spec"]["layers"]
    return asked if asked > 0 else found.get("trained_layers", SMOLLM2_LAYERS)


def _length(found: Mapping[str, Any], _base: Mapping[str, Any]) -> float:
    return found["spec"]["cap"]


def _rows(found: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """On average: ours takes fewer than it may where joining them would pad more than it saves."""
    return base["spec"]["rows"] * base["micro_batches"] / found["micro_batches"]


AXES: dict[str, Axis] = {
    "layers": Axis("layers-", "trained layers", _layers),
    "lengths": Axis("length-", "tokens of each example", _length, square=True),
    "long": Axis("long-", "tokens of each example", _length, square=True),
    "rows": Axis("rows-", "rows of a micro-batch", _rows),
}
"""By the name of the group in benchmarks.figures."""


def write(name: str, folder: Path) -> Path | None:
    """Write `<folder>/axis-<name>.json` from the group's files; None where there are none."""
    axis = AXES[name]
    reports = [files.read_json(path) for path in sorted(folder.glob(f"{axis.prefix}*.json"))]
    if not reports:
        return None
    path = folder / f"axis-{name}.json"
    files.write_json(path, summary(name, reports))
    return path


def summary(name: str, reports: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Each variant's points in order of x, and its laws; only where losses agreed.

    Seconds are of one micro-batch in a later pass: on the axis of rows a law in x then has in it
    what a start costs (c) and what a row costs (a).
    """
    axis, points, wrong = AXES[name], {}, {}
    for report in reports:
        base = report["variants"][report["baseline"]]
        for variant, found in report["variants"].items():
            if found.get("agrees") and found.get("later_s"):
                x = axis.x(found, base)
                points.setdefault(variant, []).append({"x": x, **_point(found)})
            else:
                wrong.setdefault(variant, []).append(report["name"])
    series = {}
    for variant, unsorted in points.items():
        listed = sorted(unsorted, key=lambda point: point["x"])
        laws = {key: _law(listed, key, axis.square) for key in ("seconds", "above_gb")}
        series[variant] = {"points": listed, "laws": laws}
    first = min(reports, key=lambda report: report["machine"]["time"])
    return {
        "kind": "axis",
        "name": name,
        "label": axis.label,
        "baseline": reports[0]["baseline"],
        "machine": first["machine"],
        "repeats": reports[0]["repeats"],
        "device": reports[0]["variants"][reports[0]["baseline"]]["device"],
        "series": series,
        "without_a_figure": wrong,
    }


def _law(points: list[Mapping[str, Any]], key: str, square: bool) -> dict[str, Any] | None:
    found = fits.fit([p["x"] for p in points], [p[key] for p in points], square)
    return None if found is None else found.record()


def _point(found: Mapping[str, Any]) -> dict[str, Any]:
    """One variant at one value; `rows` as asked for."""
    return {
        "rows": found["spec"]["rows"],
        "asked": found["spec"]["layers"],
        "pass_s": found["later_s"]["median"],
        "first_s": found["first_s"]["median"],
        "micro_batches": found["micro_batches"],
        "seconds": found["later_s"]["median"] / found["micro_batches"],
        "above_gb": found["above_mb"]["median"] / 1e3,
        "padding_share": found["padding_share"],
    }
