"""Files of results as Markdown, one function for each kind of file. No MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.fits import Fit

MOST_APART = 1e-4
"""Of their change: adapters with and without the activation cache, in float32."""


def of(report: Mapping[str, Any]) -> str:
    """One file of results as Markdown, and the machine it was taken on."""
    kind = report.get("kind") or next(kind for key, kind in BY_KEY.items() if key in report)
    return f"{KINDS[kind](report)}\n{taken(report)}\n"


def _variants(report: Mapping[str, Any]) -> str:
    heads = (
        "",
        "later pass",
        "speed",
        "first pass",
        "speed",
        "peak above the weights",
        "of mlx-lm's",
        "padding",
        "loss",
    )
    return _markdown(heads, (_variant(*pair) for pair in report["variants"].items()))


def _variant(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if not found.get("agrees"):
        return (name, "no figure: its losses are not mlx-lm's", *[""] * 7)
    ratio = found["ratios"]
    return (
        name,
        _seconds(found["later_s"]),
        _times(ratio["later"]),
        _seconds(found["first_s"]),
        _times(ratio["first"]),
        f"{found['above_mb']['median'] / 1e3:.2f} GB",
        f"{ratio['above']:.0%}" if ratio["above"] else "",
        f"{found['padding_share']:.0%}",
        f"{found['loss']:.5f}",
    )


def _stages(report: Mapping[str, Any]) -> str:
    rows = [
        (stage, f"{x['seconds']:.1f} s", f"{x['processor_s']:.1f} s", f"{x['peak_mb']:.0f} MB")
        for stage, x in report["stages"].items()
    ]
    together = f"{report['together_s']:.1f} s"
    rows.append(("without model", together, "", f"{report['peak_mb']:.0f} MB"))
    head = _markdown(("stage", "time", "processor", "peak memory"), rows)
    ours, bare = report["tokenize_rows_per_s"], report["bare_loop_rows_per_s"]
    return (
        f"{head}\n{report['rows']:,} rows. tokenize takes {ours:,.0f} rows a second, a bare"
        f" `encode_batch` loop over the same texts {bare:,.0f}: {ours / bare:.2f} of it.\n"
    )


def taken(report: Mapping[str, Any]) -> str:
    """When, on what and with what a file was measured."""
    machine, devices = report["machine"], {}
    for found in [report, *report.get("variants", {}).values()]:
        if "device" in found:
            devices[found["device"]["name"]] = found["device"]["kind"]
    device = ", ".join(f"{name} ({kind})" for name, kind in devices.items())
    where = device or machine["processor"]
    repeats = f", {report['repeats']} turn(s)" if "repeats" in report else ""
    return (
        f"Taken {machine['time']} on {where}, {machine['cores']} cores, mlx"
        f" {machine['versions']['mlx']}, mlx-lm {machine['versions']['mlx-lm']}{repeats}; load"
        f" before it {machine['load']}. `benchmarks/results/` holds each run.\n"
    )


def _markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _seconds(found: Mapping[str, float] | None) -> str:
    return f"{found['median']:.2f} s" if found else ""


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else ""


def _axis(report: Mapping[str, Any]) -> str:
    """Seconds of a pass and peak of each variant at each value; then the laws of growth."""
    series = report["series"]
    names = [report["baseline"], *(name for name in series if name != report["baseline"])]
    asked = "rows" if report["name"] == "rows" else "x"
    values = sorted({point[asked] for name in names for point in series[name]["points"]})
    at = {name: {point[asked]: point for point in series[name]["points"]} for name in names}
    base = at[report["baseline"]]
    rows = [
        (f"{value:g}", *(_beside(at[name].get(value), base.get(value)) for name in names))
        for value in values
    ]
    table = _markdown((report["label"], *names), rows)
    for name, places in report["without_a_figure"].items():
        table += f"\nNo figure, its losses are not mlx-lm's: {name} in {', '.join(places)}.\n"
    laws = [
        f"- {name}: {' and '.join(parts)}"
        for name in names
        if (parts := list(_laws(series[name]["laws"])))
    ]
    if not laws:
        return table
    return (
        f"{table}\nEach: a later pass, peak above the weights (× as fast, share of the memory)."
        f" Laws of one micro-batch, x = {report['label']}:\n\n" + "\n".join(laws) + "\n"
    )


def _laws(laws: Mapping[str, Any]) -> Iterable[str]:
    """Where a point is left over; without one a law is a line through all points."""
    for key, unit in (("seconds", "s"), ("above_gb", "GB")):
        if laws[key] is not None and laws[key]["spare"] > 0:
            yield Fit(**laws[key]).told(unit)


def _beside(point: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> str:
    if point is None:
        return ""
    text = f"{point['pass_s']:.2f} s, {point['above_gb']:.2f} GB"
    if base is None or base is point:
        return text
    times, share = base["pass_s"] / point["pass_s"], point["above_gb"] / base["above_gb"]
    return f"{text} ({times:.2f} ×, {share:.0%})"


def _gradients(report: Mapping[str, Any]) -> str:
    """One line for each shape, one column for each way."""
    found = {(cell["rows"], cell["length"], cell["way"]): cell for cell in report["cells"]}
    rows = [
        (f"{rows} × {length}", *(_cell(found[rows, length, way]) for way in report["ways"]))
        for length in report["lengths"]
        for rows in report["rows"]
    ]
    gradient = max(cell["gradient_error"] for cell in report["cells"])
    loss = max(cell["loss_error"] for cell in report["cells"])
    return (
        _markdown(("rows × tokens", *report["ways"]), rows)
        + "\nSeconds of one gradient and peak above what rests. Losses and gradients are"
        f" {_within(loss)} and {_within(gradient)} those of keeping all.\n"
    )


def _within(error: float) -> str:
    return f"within {error:.0e} of" if error else "bit for bit"


def _cell(cell: Mapping[str, Any]) -> str:
    if not cell["agrees"]:
        return "no figure: another gradient"
    return f"{cell['seconds']:.2f} s, {cell['peak_gb']:.2f} GB"


def _reach(report: Mapping[str, Any]) -> str:
    """When each side was below the loss, and its curve."""
    rows = [
        (
            name,
            _seconds_of(side["reached_s"]),
            _times(side["times_faster"]),
            "; ".join(
                f"{x['update']}: {x['loss']:.4f} ({x['seconds']:.0f} s)" for x in side["curve"]
            ),
        )
        for name, side in report["sides"].items()
    ]
    heads = ("", f"below {report['loss']:.4f} after", "speed", "update: validation loss (at)")
    return _markdown(heads, rows) + f"\n{report['words']}\n"


def _seconds_of(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.1f} s"


def _points(report: Mapping[str, Any]) -> str:
    """Points of a sweep together beside as many runs of mlx-lm."""
    apart, points = report["change_apart"], report["points"]
    if not apart <= MOST_APART:
        return f"No figure: adapters with and without the cache are {apart:.1e} apart.\n"
    runs = " and ".join(f"{x:.1f}" for x in report["mlx_lm_s"])
    later = [x["seconds"] for x in points[1:]]
    each = f"{points[0]['seconds']:.1f} s, then {min(later):.1f} to {max(later):.1f} s"
    rows = [
        ("mlx-lm", f"{report['eight_of_mlx_lm_s']:.0f} s", f"mean of {runs} s", "1.00"),
        ("ours", f"{report['ours_s']:.0f} s", each, _times(report["times_faster"])),
    ]
    return (
        _markdown(("", f"{len(points)} points", "each", "speed"), rows)
        + f"\n{report['examples']} examples, {report['passes']} passes; ours with its start and the"
        " load of the model, mlx-lm without. The last point once more without the cache:"
        f" {report['one_without_cache_s']:.1f} s, adapters {apart:.0e} of their change apart.\n"
    )


def _resume(report: Mapping[str, Any]) -> str:
    """What a kill costs."""
    found = report["medians"]
    rows = [
        ("an undisturbed update", f"{found['update_s']:.2f} s"),
        ("from kill to the end of the first new update", f"{found['to_first_update_s']:.2f} s"),
        ("the cost of the stop", f"{found['cost_s']:.2f} s"),
        *(
            (f"a checkpoint of {name} ({x['mb']:.1f} MB)", f"{x['seconds'] * 1e3:.0f} ms")
            for name, x in report["checkpoints"].items()
        ),
    ]
    same = "the same bits" if report["same_bits"] else "**other bits**"
    end = f"\n{report['words']} Adapters end as {same} of the run left alone.\n"
    return _markdown(("", "time"), rows) + end


def _profile(report: Mapping[str, Any]) -> str:
    """Each part of an update on each side: time, floor, share of the device's rate."""
    blocks = []
    for name, side in report["sides"].items():
        rows = [
            (
                x["part"],
                f"{x['seconds'] * 1e3:.1f} ms",
                f"{x['seconds'] / side['update_s']:.0%}",
                f"{x['floor_s'] * 1e3:.1f} ms" if x["floor_s"] else "",
                f"{x['tflop']:.3g}" if x["tflop"] else "",
                f"{x['rate_share']:.0%}" if x["rate_share"] else "",
            )
            for x in side["parts"]
        ]
        heads = (name, "time", "share", "floor", "TFLOP", "of the matrix rate")
        blocks.append(_markdown(heads, rows))
    rates = report["rates"]
    return "\n".join(blocks) + (
        f"\n{report['words']} Measured in the same run: {rates['tflops']:.3g} TFLOP/s in a"
        f" product of {rates['product']}, {rates['gb_s']:.0f} GB/s.\n"
    )


KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "variants": _variants,
    "stages": _stages,
    "axis": _axis,
    "gradients": _gradients,
    "reach": _reach,
    "points": _points,
    "resume": _resume,
    "profile": _profile,
}
"""By the `kind` of a file."""

BY_KEY = {"stages": "stages", "eight_of_mlx_lm_s": "points", "variants": "variants"}
"""The kind of a file that names none, by what it holds."""
