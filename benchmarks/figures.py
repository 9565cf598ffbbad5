"""Which variants a figure compares. The first is always mlx-lm's loop as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import choice
from benchmarks.spec import OURS, THEIRS, Spec
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
        few: Examples where an axis is measured.
    """

    folder: Path
    rows: int = ROWS
    cap: int = CAP
    passes: int = 2
    usual: int = 8
    layers: tuple[int, ...] = (4, 8, 16, -1)
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    sizes: tuple[int, ...] = (1, 4, 16)
    few: int = 8


def quick(folder: Path) -> Job:
    """For trying out the harness on the tiny model; its numbers mean nothing."""
    return Job(folder, rows=16, cap=96, usual=2, layers=(2, -1), lengths=(32, 64), sizes=(2, 4))


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
    "rows": rows,
    "recompute": recompute,
}
"""Name of a group → figures by name."""
