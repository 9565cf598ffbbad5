"""Run variants in turn, each a child process: A B C A B C; medians, spread, losses compared."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, workspace
from benchmarks.spec import THEIRS, Spec
from stages.core import console, files

AGREE = {"float32": 1e-4}
AGREE_COARSE = 5e-3
"""How far the losses of both sides may be apart, relative, by type."""
FIGURES = ("first_s", "later_s", "peak_mb", "later_peak_mb", "above_mb", "held_mb", "setup_s")
Measure = Callable[[Spec], dict[str, Any]]


def measured_in(folder: Path) -> Measure:
    """Measures a spec in a child process that works in this workspace."""

    def measure(spec: Spec) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as aside:
            result = Path(aside) / "result.json"
            workspace.run(folder, "-m", "benchmarks.child", spec.text(), str(result))
            return files.read_json(result)

    return measure


def take(
    name: str, specs: Mapping[str, Spec], repeats: int, measure: Measure, out: Path
) -> dict[str, Any]:
    """Measure all variants in turn, `repeats` times, and write `<out>/<name>.json`.

    The first variant of mlx-lm's side is what the others are compared with. A child that dies is
    written down with the end of what it said.
    """
    report = {"name": name, "machine": machine.facts(), "repeats": repeats}
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in specs}
    for turn in range(repeats):
        for variant, spec in specs.items():
            try:
                found = measure(spec)
            except RuntimeError as error:
                found = {"failed": str(error)}
            runs[variant].append(found)
            console.say(f"{name}, turn {turn + 1} of {repeats}, {variant}: {told(found)}")
            files.write_json(out / f"{name}.json", {**report, **summary(specs, runs)})
    report = {**report, **summary(specs, runs)}
    for line in lines(report):
        console.say(line)
    return report


def summary(
    specs: Mapping[str, Spec], runs: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """Medians and spread of each variant, and its ratios to mlx-lm where the losses agree."""
    baseline = next((name for name, spec in specs.items() if spec.side == THEIRS), None)
    variants = {name: condensed(name, runs[name]) for name in specs if runs[name]}
    base = variants.get(baseline or "")
    for variant in variants.values():
        variant["agrees"] = base is not None and agree(variant, base)
        if variant["agrees"]:
            variant["ratios"] = ratios(variant, base)
    return {
        "baseline": baseline,
        "variants": variants,
        "runs": {k: list(x) for k, x in runs.items()},
    }


def condensed(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One variant's runs as medians with their spread."""
    good = [x for x in found if "failed" not in x]
    if not good:
        return {"failed": found[-1]["failed"]}
    last = good[-1]
    kept = ("loss", "targets", "tokens", "padded_tokens", "micro_batches", "shapes", "weights_mb")
    more = ("plan", "notes", "dtype", "device", "spec", "trained_layers")
    return {
        **{key: spread([y for x in good for y in _listed(x.get(key))]) for key in FIGURES},
        **{key: last[key] for key in (*kept, *more) if key in last},
        "padding_share": 1 - last["tokens"] / last["padded_tokens"],
        "failures": len(found) - len(good),
    }


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, lowest and highest, and all values in order; None where there are none."""
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "values": list(values),
    }


def agree(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two variants have the same loss over the same targets, within rounding."""
    if "failed" in a or "failed" in b or a["targets"] != b["targets"]:
        return False
    limit = AGREE.get(a["dtype"], AGREE_COARSE)
    return math.isclose(a["loss"], b["loss"], rel_tol=limit)


def ratios(variant: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float | None]:
    """How many times faster a pass is, and which share of the memory above the weights it takes."""

    def divided(a: Any, b: Any) -> float | None:
        return None if not a or not b or not b["median"] else a["median"] / b["median"]

    later = variant["later_s"] and base["later_s"]
    return {
        "first": divided(base["first_s"], variant["first_s"]),
        "later": divided(base["later_s"], variant["later_s"]) if later else None,
        "above": divided(variant["above_mb"], base["above_mb"]),
        "peak": divided(variant["peak_mb"], base["peak_mb"]),
    }


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A figure for people; a variant is shown only where its losses agree with mlx-lm's."""
    width = max(map(len, report["variants"]))
    for name, found in report["variants"].items():
        yield f"{name:<{width}}  {_line(found)}"


def _line(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    if not found["agrees"]:
        return "no figure: its losses are not mlx-lm's"
    ratio = found["ratios"]
    parts = [f"first {_seconds(found['first_s'])}, {ratio['first']:.2f} times mlx-lm's speed"]
    if ratio["later"]:
        parts.append(f"later {_seconds(found['later_s'])}, {ratio['later']:.2f} times")
    share = f", {ratio['above']:.0%} of mlx-lm's" if ratio["above"] else ""
    parts.append(f"peak {found['peak_mb']['median']:.0f} MB")
    parts.append(f"{found['above_mb']['median']:.0f} above the weights{share}")
    return "; ".join(parts)


def told(found: Mapping[str, Any]) -> str:
    """One run in one line."""
    if "failed" in found:
        return f"failed: {found['failed']}"
    later = ", ".join(f"{x:.2f}" for x in found["later_s"])
    return (
        f"{found['first_s']:.2f} s, then {later} s; peak {found['peak_mb']:.0f} MB,"
        f" loss {found['loss']:.6f}"
    )


def _listed(value: Any) -> list[float]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _seconds(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} s ({values['low']:.2f} to {values['high']:.2f})"
