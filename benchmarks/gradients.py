"""Which layers are made again in the backward pass: `python -m benchmarks.gradients [--shape S]`.

Time and peak of one micro-batch's gradient, at every length and number of rows, from the stored
output of the frozen layers. One model in one process of its own; a way has a figure only where loss
and whole gradient are those of keeping everything. Without --shape: SmolLM2, its longest real
examples cut to each length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import choice, figures, machine, workspace
from benchmarks.spec import OURS, Spec, from_text
from benchmarks.widths import SHAPES
from stages.core import console, entry, files
from stages.core.machine import device
from stages.core.tables import read_examples

LENGTHS, ROWS = (128, 256, 512), (1, 2, 8)
GPU_LENGTHS, GPU_ROWS = (256, 512, 1024), (1, 4, 16)


def main(argv: Sequence[str]) -> int:
    """Take the figures and write `<out>/<name>.json`, or be the process that measures."""
    if given := workspace.asked_of(list(argv)):
        asked, result = given
        return entry.guarded("benchmarks", lambda: files.write_json(result, measured(asked)))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradients", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), help="a random model; default SmolLM2")
    parser.add_argument("--dtype", default="bfloat16", help="of a random model")
    parser.add_argument("--bits", type=int, help="of a random model's quantized weights")
    parser.add_argument("--layers", type=int, default=8, help="trained layers")
    parser.add_argument("--lengths", type=_numbers, help="tokens, separated by commas")
    parser.add_argument("--rows", type=_numbers, help="of a micro-batch, separated by commas")
    parser.add_argument("--repeats", type=int, default=1, help="of each; least seconds count")
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--name", help="of the result; default gradients[-<shape>]")
    parser.add_argument("--out", type=Path)
    return entry.guarded("benchmarks", lambda: _take(parser.parse_args(argv)))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _take(given: argparse.Namespace) -> int:
    shape = given.shape or ("qwen3-nano" if given.quick else None)
    lengths, rows = (GPU_LENGTHS, GPU_ROWS) if given.shape else (LENGTHS, ROWS)
    lengths, rows = ((16, 48), (1, 2)) if given.quick else (lengths, rows)
    lengths, rows = given.lengths or list(lengths), given.rows or list(rows)
    folder = workspace.WORK / f"gpu-{shape}" if shape else workspace.make("smollm2")
    found = {length: _examples(folder, shape, length, max(rows)) for length in lengths}
    spec = Spec(
        OURS,
        found[max(lengths)],
        max(lengths),
        layers=2 if given.quick else given.layers,
        rows=max(rows),
        effective=max(rows),
        shape=shape,
        dtype="float32" if given.quick else given.dtype,
        bits=given.bits,
        kind="cpu" if given.quick else given.device,
    )
    facts = machine.facts()
    asked = {"spec": spec.text(), "files": [[k, v] for k, v in found.items()]}
    asked |= {"rows": rows, "repeats": given.repeats}
    made = workspace.measured(folder, "benchmarks.gradients", asked)
    report = {"kind": "gradients", "machine": facts, "repeats": given.repeats, **made}
    name = given.name or (f"gradients-{shape}" if shape and not given.quick else "gradients")
    out = given.out or (workspace.WORK / "quick" if given.quick else machine.RESULTS)
    files.write_json(out / f"{name}.json", report)
    for cell in report["cells"]:
        console.say(told(cell))
    wrong = [told(cell) for cell in report["cells"] if not cell["agrees"]]
    if wrong:
        console.fail(["Some ways have no figure", *wrong])
    return entry.FAILED if wrong else entry.DONE


def _examples(folder: Path, shape: str | None, length: int, count: int) -> str:
    """The name of a file in the workspace with `count` examples of one length."""
    if shape is None:
        return figures.long(figures.Job(folder), length, count)
    name = f"examples-random-{count}-{length}.parquet"
    drawn = choice.random([(2 * length // 3, length)] * count, SHAPES[shape]["vocab_size"])
    choice.write(folder / name, drawn)
    return name


def told(cell: dict[str, Any]) -> str:
    """One measurement in one line."""
    found = f"{cell['seconds']:.3f} s, {cell['peak_gb']:.3f} GB above what rests"
    if not cell["agrees"]:
        found = (
            f"no figure: loss off by {cell['loss_error']:.1e},"
            f" gradient by {cell['gradient_error']:.1e}"
        )
    return f"{cell['rows']} x {cell['length']}, {cell['way']}: {found}"


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """All cells, in this process."""
    spec = from_text(asked["spec"])
    chosen = device.prepare(spec.kind, measure=True)
    from benchmarks import subject as subjects
    from benchmarks import ways
    from stages.core.layers.guard import perturbed_adapters
    from stages.core.update.step import Step

    loaded = subjects.load(spec, chosen, subjects.settings_of(spec), lazy=False)
    plan = subjects.equal_rows(spec, loaded.manifest, loaded.examples, chosen.kind)
    step = Step(loaded.model, loaded.attached, plan)
    cells = []
    with perturbed_adapters(loaded.model):
        for length, name in asked["files"]:
            examples = read_examples(Path(name))
            for rows in asked["rows"]:
                micro = ways.first(examples, rows, replace(plan, widths=(length,)))
                cells += ways.cells(step, micro, asked["repeats"], warm=chosen.kind != "cpu")
    step.close()
    return {
        "device": chosen.record(),
        "model": loaded.manifest.line(),
        "spec": asdict(spec),
        "plan": plan.record(),
        "lengths": [length for length, _ in asked["files"]],
        "rows": asked["rows"],
        "ways": list(ways.WAYS),
        "cells": cells,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
