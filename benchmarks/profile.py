"""Where the time of one update goes: `python -m benchmarks.profile [--shape S]`.

Each side in a process of its own: the whole update as its loop takes it, then each part alone
(benchmarks.parts), beside what the part needs at least at the rates measured there
(benchmarks.operations). Without --shape: SmolLM2 and eight examples of the default job. With one no
DVC, Hydra, model or data are needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import choice, figures, gpu, machine, workspace
from benchmarks.spec import OURS, THEIRS, Spec, from_text
from benchmarks.widths import SHAPES
from stages.core import console, entry, files
from stages.core.machine import device

OPTIMIZER, BUILDING, REST = "optimizer", "building graphs (Python)", "all else"
WHOLE = "the whole update"


def main(argv: Sequence[str]) -> int:
    """Take the figures and write `<out>/<name>.json`, or be the process that measures."""
    if given := workspace.asked_of(list(argv)):
        asked, result = given
        return entry.guarded("benchmarks", lambda: files.write_json(result, measured(asked)))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), help="a random model; default SmolLM2")
    parser.add_argument("--dtype", default="bfloat16", help="of a random model")
    parser.add_argument("--bits", type=int, help="of a random model's quantized weights")
    parser.add_argument("--layers", type=int, default=8, help="trained layers")
    parser.add_argument("--rows", type=int, help="of a micro-batch; default 4, with --shape 8")
    parser.add_argument("--effective", type=int, help="examples; default 8, with --shape 32")
    parser.add_argument("--cap", type=int, help="longest example; default 384, with --shape 2048")
    parser.add_argument("--passes", type=int, default=3, help="updates; the first is not counted")
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--name", help="of the result; default profile[-<shape>[-4bit]]")
    parser.add_argument("--out", type=Path)
    return entry.guarded("benchmarks", lambda: _take(parser.parse_args(argv)))


def _take(given: argparse.Namespace) -> int:
    folder, spec = _subject(given)
    ours = replace(spec, side=OURS)
    specs = {
        "mlx-lm": spec,
        "ours, equal rows": ours,
        "ours, frozen layers cached": replace(ours, plan=figures.CACHED),
    }
    report: dict[str, Any] = {"kind": "profile", "machine": machine.facts(), "sides": {}}
    for name, side in specs.items():
        found = workspace.measured(folder, "benchmarks.profile", {"spec": side.text()})
        report["sides"][name] = found
        console.say(told(name, found))
    first = report["sides"]["mlx-lm"]
    report |= {"device": first["device"], "rates": first["rates"], "words": _words(spec, first)}
    packed = "" if given.bits is None else f"-{given.bits}bit"
    shape = "" if given.quick or given.shape is None else f"-{given.shape}{packed}"
    out = given.out or (workspace.WORK / "quick" if given.quick else machine.RESULTS)
    files.write_json(out / f"{given.name or f'profile{shape}'}.json", report)
    losses = [side["loss"] for side in report["sides"].values()]
    limit = 1e-4 if first["dtype"] == "float32" else 5e-3
    if max(losses) - min(losses) > limit * abs(losses[0]):
        console.fail([f"The sides have different losses: {losses}"])
        return entry.FAILED
    return entry.DONE


def _subject(given: argparse.Namespace) -> tuple[Path, Spec]:
    """The workspace, and mlx-lm's side."""
    shape = given.shape or ("qwen3-nano" if given.quick else None)
    if shape is None:
        job = figures.Job(workspace.make("smollm2"), cap=given.cap or figures.CAP)
        rows, effective = given.rows or 4, given.effective or 8
        name = figures.real(job, effective)
        return job.folder, Spec(
            THEIRS, name, job.cap, given.layers, rows, effective, given.passes, kind=given.device
        )
    rows, effective = given.rows or 8, given.effective or gpu.EFFECTIVE
    cap, layers, dtype = given.cap or gpu.CAP, given.layers, given.dtype
    if given.quick:
        rows, effective, cap, layers, dtype = 2, 4, 64, 2, "float32"
    folder = workspace.WORK / f"gpu-{shape}"
    name = f"examples-{effective}-{cap}.parquet"
    choice.write(folder / name, gpu.examples(effective, cap, SHAPES[shape]["vocab_size"]))
    spec = Spec(THEIRS, name, cap, layers, rows, effective, given.passes, shape=shape, dtype=dtype)
    return folder, replace(spec, bits=given.bits, kind="cpu" if given.quick else given.device)


def _words(spec: Spec, found: dict[str, Any]) -> str:
    return (
        f"One update of {spec.effective} examples of at most {spec.cap} tokens, {spec.rows} rows a"
        f" micro-batch, LoRA on the last {spec.layers} layers; {found['model']}."
    )


def told(name: str, side: dict[str, Any]) -> str:
    """One side in one line."""
    parts = ", ".join(f"{x['part']} {x['seconds'] * 1e3:.1f}" for x in side["parts"])
    return f"{name}, ms: {parts}"


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """One side, in this process."""
    spec = from_text(asked["spec"])
    chosen = device.prepare(spec.kind, measure=True, tuned=spec.side == OURS)
    from benchmarks import sides

    found = sides.measured(spec, chosen)
    rates, costs = found.pop("rates"), found.pop("costs")
    seconds, whole = found.pop("seconds"), found["update_s"]
    seconds[REST] = whole - sum(seconds.values())
    seconds[WHOLE] = whole
    costs[WHOLE] = sum(costs.values(), type(next(iter(costs.values())))())
    floors = {part: rates.floor(cost) for part, cost in costs.items()}
    floors[WHOLE] = sum(floor for part, floor in floors.items() if part != WHOLE)
    parts = []
    for part, taken in seconds.items():
        work = costs[part].operations if part in costs else 0.0
        one = {
            "part": part,
            "seconds": taken,
            "floor_s": floors.get(part),
            "tflop": work / 1e12,
            "gb": costs[part].bytes / 1e9 if part in costs else 0.0,
            "rate_share": work / taken / rates.operations_s if work and taken > 0 else None,
        }
        parts.append(one)
    return {
        **found,
        "spec": asdict(spec),
        "device": chosen.record(),
        "rates": rates.record(),
        "parts": parts,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
