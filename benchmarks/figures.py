"""Which variants a figure compares. The first is always mlx-lm's loop as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import choice
from benchmarks.spec import OURS, THEIRS, Spec
from benchmarks.widths import SHAPES
from stages.core.tables import read_examples

ROWS, CAP = 32, 384
CACHED = {"activation_cache": True}
LEAST = {**CACHED, "recompute": 1, "loss_chunk": 32, "memory_limit_gb": 0.44}
"""Memory before time; MLX waits for operations under way above 0.2 GB beside the weights left."""


@dataclass(frozen=True)
class Job:
    """What figures are taken of.

    Attributes:
        folder: The workspace.
        rows: Examples in the short figures.
        cap: Their longest.
        passes: Over the examples.
        usual: Trained layers where they are no axis.
        layers: Values of the axis of layers.
        lengths: Values of the axis of lengths.
        sizes: Values of the axis of rows per micro-batch.
        long: Lengths of the random shape's axis: SmolLM2 would take minutes for each there.
        few: Examples where an axis is measured.
        whole: Layers trained whole.
        random: The random shape.
    """

    folder: Path
    rows: int = ROWS
    cap: int = CAP
    passes: int = 2
    usual: int = 8
    layers: tuple[int, ...] = (4, 8, 16, -1)
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    sizes: tuple[int, ...] = (1, 4, 16)
    long: tuple[int, ...] = (512, 1024, 2048, 4096)
    few: int = 8
    whole: int = 2
    random: str = "qwen3-mini"


def quick(folder: Path) -> Job:
    """For trying out the harness on the tiny model; its numbers mean nothing."""
    axes = {"layers": (2, -1), "lengths": (32, 64), "sizes": (2, 4), "long": (32, 64, 128)}
    return Job(folder, rows=16, cap=96, usual=2, **axes, whole=1, random="qwen3-nano")


def default(job: Job) -> dict[str, Spec]:
    """The default job: LoRA on the last 8 layers, 4 rows a micro-batch, 8 an update."""
    theirs = Spec(THEIRS, real(job), job.cap, job.usual, passes=job.passes)
    ours = replace(theirs, side=OURS)
    return {
        "mlx-lm": theirs,
        "mlx-lm, checkpointing": replace(theirs, grad_checkpoint=True),
        "ours, equal rows": ours,
        "ours, every layer recomputed": replace(ours, plan={"recompute": 1}),
        "ours, frozen layers cached": replace(ours, plan=CACHED),
        "ours, least memory": replace(ours, plan=LEAST),
        "ours, as planned": replace(ours, planned=True),
    }


def layers(job: Job) -> dict[str, dict[str, Spec]]:
    """Trained layers, from few to all; one comparison each."""
    return {
        f"layers-{'all' if count == -1 else count}": _pair(
            Spec(THEIRS, real(job, job.few), job.cap, passes=job.passes, layers=count),
            cached=count != -1,
        )
        for count in job.layers
    }


def lengths(job: Job) -> dict[str, dict[str, Spec]]:
    """Rows of one length each, from short to long; one comparison each."""
    return {
        f"length-{length}": _pair(
            Spec(THEIRS, long(job, length, job.few // 2), length, job.usual, 2, 4, job.passes)
        )
        for length in job.lengths
    }


def long_rows(job: Job) -> dict[str, dict[str, Spec]]:
    """Random tokens of one length each through a small random model, one row a micro-batch."""
    shape = SHAPES[job.random]
    trained = shape["num_hidden_layers"] // 2
    figures = {}
    for length in job.long:
        name = f"examples-random-2-{length}.parquet"
        drawn = choice.random([(2 * length // 3, length)] * 2, shape["vocab_size"])
        choice.write(job.folder / name, drawn)
        theirs = Spec(THEIRS, name, length, trained, 1, 2, job.passes)
        figures[f"long-{length}"] = _pair(replace(theirs, shape=job.random, dtype="float32"))
    return figures


def kinds(job: Job) -> dict[str, dict[str, Spec]]:
    """What else is trained than LoRA, and micro-steps that MLX compiles, as mlx-lm's always are."""
    lora = Spec(THEIRS, real(job, job.few), job.cap, job.usual, passes=job.passes)
    ours = replace(lora, side=OURS)
    compiled = {
        "mlx-lm": lora,
        "ours, cached": replace(ours, plan=CACHED),
        "ours, cached, compiled": replace(ours, plan={**CACHED, "compiled": True}),
    }
    return {
        "kind-full": _pair(replace(lora, fine_tune_type="full", layers=job.whole)),
        "kind-dora": _pair(replace(lora, fine_tune_type="dora")),
        "kind-compiled": compiled,
    }


def rows(job: Job) -> dict[str, dict[str, Spec]]:
    """Rows per micro-batch, equal on both sides; one comparison each."""
    return {
        f"rows-{size}": _pair(
            Spec(THEIRS, real(job, 2 * job.few), job.cap, job.usual, size, 16, job.passes)
        )
        for size in job.sizes
    }


def recompute(job: Job) -> dict[str, dict[str, Spec]]:
    """Which layers are made again in the backward pass, for short and long rows."""
    places = {
        "nothing again": {},
        "every 4th layer": {"recompute": 4},
        "every 2nd layer": {"recompute": 2},
        "the first half": {"recompute": 2, "recompute_place": "first"},
        "the last half": {"recompute": 2, "recompute_place": "last"},
        "all layers": {"recompute": 1},
    }
    figures = {}
    for length in (job.lengths[1], job.lengths[-1]):
        theirs = Spec(THEIRS, long(job, length, job.few // 2), length, job.usual, 2, 4, 2)
        ours = replace(theirs, side=OURS)
        figures[f"recompute-{length}"] = {
            "mlx-lm": theirs,
            "mlx-lm, checkpointing": replace(theirs, grad_checkpoint=True),
            **{f"ours, {name}": replace(ours, plan=CACHED | x) for name, x in places.items()},
        }
    return figures


def _pair(theirs: Spec, cached: bool = True) -> dict[str, Spec]:
    ours = replace(theirs, side=OURS)
    more = {"ours, frozen layers cached": replace(ours, plan=CACHED)} if cached else {}
    return {"mlx-lm": theirs, "ours, equal rows": ours, **more}


def real(job: Job, count: int | None = None) -> str:
    """Real examples at even steps of length, at most the cap; the file's name in the workspace."""
    count = count or job.rows
    return _file(job, f"examples-{count}-{job.cap}.parquet", job.cap, choice.spread, count)


def long(job: Job, length: int, count: int) -> str:
    """The longest real examples, cut to one length."""
    return _file(job, f"examples-long-{count}-{length}.parquet", length, choice.longest, count)


def _file(job: Job, name: str, cap: int, choose: Callable, count: int) -> str:
    rows = choice.usable(read_examples(job.folder / "data/examples/train.parquet"), cap)
    choice.write(job.folder / name, choose(rows, count))
    return name


GROUPS: dict[str, Callable[[Job], dict[str, dict[str, Spec]]]] = {
    "default": lambda job: {"default": default(job)},
    "layers": layers,
    "lengths": lengths,
    "long": long_rows,
    "rows": rows,
    "recompute": recompute,
    "kinds": kinds,
}
"""Name of a group → figures by name."""
