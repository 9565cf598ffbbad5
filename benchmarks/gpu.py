"""Qwen3 shapes with random weights on a GPU: `python -m benchmarks.gpu [SHAPE ...] [--out DIR]`.

Needs mlx for that GPU, mlx-lm, and of this project's packages only numpy, pyarrow, psutil, rich,
transformers and omegaconf: no DVC, no Hydra, no model, no data. Weights are drawn on the device,
examples are random tokens of the lengths that the default corpus has (benchmarks/lengths.json).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import choice, turns, workspace
from benchmarks.machine import REPOSITORY
from benchmarks.spec import OURS, THEIRS, Spec
from benchmarks.widths import SHAPES
from stages.core import console, entry

LENGTHS = REPOSITORY / "benchmarks" / "lengths.json"
DEFAULT = ("qwen3-0.6b", "qwen3-4b")
CAP, ROWS, EFFECTIVE = 2048, 128, 32
CACHED = {"activation_cache": True}


def main(argv: Sequence[str]) -> int:
    """Take the figures of each shape and write `<out>/gpu-<shape>.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each variant")
    parser.add_argument("--passes", type=int, default=2, help="the first compiles kernels")
    parser.add_argument("--rows", type=int, default=ROWS, help="examples in a pass")
    parser.add_argument("--cap", type=int, default=CAP, help="longest example, in tokens")
    parser.add_argument("--layers", type=int, default=8, help="trained layers")
    parser.add_argument("--batch", type=int, default=8, help="rows per micro-batch of mlx-lm")
    parser.add_argument("--effective", type=int, default=EFFECTIVE, help="examples per update")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--bits", type=int, help="quantized weights: QLoRA on both sides")
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--name", help="of the result; default gpu-<shape>[-4bit]")
    parser.add_argument("--variants", help="only these, by their start, separated by semicolons")
    parser.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="NAME={…}",
        help='a variant more: "ours, x={\\"batch_size\\": 16, \\"recompute\\": 1}"',
    )
    given = parser.parse_args(argv)
    return entry.guarded("benchmarks", lambda: _take(given))


def _take(given: argparse.Namespace) -> int:
    failed = []
    for shape in given.shapes or DEFAULT:
        folder = workspace.WORK / f"gpu-{shape}"
        vocabulary = SHAPES[shape]["vocab_size"]
        name = f"examples-{given.rows}-{given.cap}.parquet"
        choice.write(folder / name, examples(given.rows, given.cap, vocabulary))
        specs = variants(shape, name, given)
        packed = "" if given.bits is None else f"-{given.bits}bit"
        result = given.name or f"gpu-{shape}{packed}"
        report = turns.take(result, specs, given.repeats, turns.measured_in(folder), given.out)
        failed += [f"{shape}: {x}" for x, y in report["variants"].items() if not y["agrees"]]
    if failed:
        console.fail(["Some variants have no figure", *failed])
        return entry.FAILED
    return entry.DONE


def variants(shape: str, examples: str, given: argparse.Namespace) -> dict[str, Spec]:
    """mlx-lm's loop, ours with equal rows, and ours as it would use the memory that mlx-lm takes.

    mlx-lm accumulates up to the same effective batch.
    """
    theirs = Spec(
        THEIRS,
        examples,
        given.cap,
        layers=given.layers,
        rows=given.batch,
        effective=given.effective,
        passes=given.passes,
        shape=shape,
        dtype=given.dtype,
        bits=given.bits,
        kind=given.device,
    )
    ours = replace(theirs, side=OURS)
    tokens = given.batch * given.cap
    many = {**CACHED, "batch_size": given.effective, "batch_tokens": tokens}
    every = {
        "mlx-lm": theirs,
        "mlx-lm, checkpointing": replace(theirs, grad_checkpoint=True),
        "mlx-lm, MLX as ours runs it": replace(theirs, tuned=True),
        "ours, equal rows": ours,
        "ours, equal rows, compiled": replace(ours, plan={"compiled": True}),
        "ours, cached": replace(ours, plan=CACHED),
        "ours, cached, CUDA graphs": replace(
            ours, plan=CACHED, environment={"MLX_USE_CUDA_GRAPHS": "1"}
        ),
        "ours, cached, large pieces of loss": replace(ours, plan={**CACHED, "loss_chunk": 512}),
        "ours, cached, by padded tokens": replace(ours, plan=many),
        "ours, cached, by padded tokens, compiled": replace(ours, plan={**many, "compiled": True}),
        "ours, cached, recomputed": replace(ours, plan={**CACHED, "recompute": 1}),
        "ours, least memory": replace(
            ours, plan={**CACHED, "recompute": 1, "loss_chunk": 64, "attention_block": 256}
        ),
    }
    if given.variants:
        wanted = tuple(x.strip() for x in given.variants.split(";"))
        every = {k: x for k, x in every.items() if k == "mlx-lm" or k.startswith(wanted)}
    for text in given.plan:
        name, _, plan = text.partition("=")
        every[name] = replace(ours, plan=json.loads(plan))
    return every


def examples(count: int, cap: int, vocabulary: int) -> list[choice.Row]:
    """Random tokens of the corpus's lengths, cut to the cap, at even steps of length."""
    pairs = [(first, min(length, cap)) for first, length in json.loads(LENGTHS.read_text())]
    return choice.spread(choice.random([x for x in pairs if x[0] < x[1]], vocabulary), count)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
