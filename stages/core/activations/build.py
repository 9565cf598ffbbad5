"""Write the activations of a split: the frozen layers run once over every example.

A build lies in `<folder>.part` until it is whole, then gets its name. Each shard appears whole, and
`manifest.json` names those that do, so a build that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.core import console, files
from stages.core.activations import shards as shard_files
from stages.core.activations.layout import Layout, to_numpy
from stages.core.activations.shards import MANIFEST, Shard
from stages.core.errors import UserError
from stages.core.layers.exponentials import cheap_swiglu
from stages.core.layers.staged import StagedModel
from stages.core.memory.attention import blocked
from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching

MOST_ROWS = 1024


@dataclass(frozen=True)
class Build:
    """What is built.

    Attributes:
        folder: The final name.
        name: The split, for people.
        staged: The model; nothing of it is trained below `cut`.
        cut: The first trained layer.
        layout: Of the boundary below `cut`.
        shards: Of `examples`.
        examples: All of the split.
        plan: How many padded tokens go through the frozen layers at once.
        between: Called before each micro-batch; may raise to end the build.
    """

    folder: Path
    name: str
    staged: StagedModel
    cut: int
    layout: Layout
    shards: Sequence[Shard]
    examples: Examples
    plan: Plan
    between: Callable[[], None]

    @property
    def part(self) -> Path:
        """Where it lies until it is whole."""
        return self.folder.with_suffix(".part")

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(shard.bytes for shard in self.shards)


def build(job: Build) -> None:
    """Build the folder, going on with what an earlier build left.

    Raises:
        UserError: No space is left; what is there stays for a later build.
    """
    job.part.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(job.part)
    kept = _left(job)
    missing = [shard for shard in job.shards if shard.name not in kept]
    _write_all(job, job.part, missing, kept)
    if job.folder.exists():
        shutil.rmtree(job.folder)
    os.rename(job.part, job.folder)
    files.sync(job.folder.parent)


def mend(job: Build, bad: Sequence[Shard]) -> None:
    """Write damaged shards of a whole folder again, in place; readers keep what they have open.

    Raises:
        UserError: No space is left.
    """
    files.remove_leftovers(job.folder)
    kept = {entry["file"]: entry for entry in read_manifest(job.folder, job)}
    _write_all(job, job.folder, bad, kept)


def read_manifest(folder: Path, job: Build) -> list[dict[str, Any]]:
    """What a folder's manifest says of its shards; empty where it is none of this build."""
    try:
        manifest = files.read_json(folder / MANIFEST)
    except UserError:
        return []
    if not isinstance(manifest, dict) or manifest.get("layout") != job.layout.record():
        return []
    return manifest.get("shards", [])


def _left(job: Build) -> dict[str, dict[str, Any]]:
    """Shards of an earlier build that are whole."""
    kept = {entry["file"]: entry for entry in read_manifest(job.part, job)}
    made = [shard for shard in job.shards if shard.name in kept]
    bad = {shard.name for shard in shard_files.damaged(job.part, made, list(kept.values()))}
    if len(made) > len(bad):
        console.say(f"activations of {job.name}: goes on after {len(made) - len(bad)} shards")
    return {shard.name: kept[shard.name] for shard in made if shard.name not in bad}


def _write_all(
    job: Build, folder: Path, missing: Sequence[Shard], kept: dict[str, dict[str, Any]]
) -> None:
    kept = dict(kept)
    total = sum(len(shard.ids) for shard in missing)
    with console.progress(f"frozen layers, {job.name}", total, "examples") as advance:
        for shard in missing:
            sha256 = _write(job, folder / shard.name, shard, advance)
            kept[shard.name] = shard_files.record(shard, sha256)
            _write_manifest(job, folder, kept)
    if not missing:
        _write_manifest(job, folder, kept)
    mx.clear_cache()


def _write_manifest(job: Build, folder: Path, kept: dict[str, dict[str, Any]]) -> None:
    content = {
        "examples": len(job.examples),
        "tokens": int(job.examples.offsets[-1]),
        "first_trained_layer": job.cut,
        "layout": job.layout.record(),
        "shards": [kept[name] for name in sorted(kept)],
    }
    files.write_json(folder / MANIFEST, content)


def _write(job: Build, path: Path, shard: Shard, advance: Callable[..., None]) -> str:
    """Compute and write one shard; its SHA-256."""
    digest = hashlib.sha256()
    lengths = job.examples.lengths
    plan = _forward_plan(job.plan, lengths)
    with files.replacing(path) as temporary, open(temporary, "wb") as file:
        for ids in batching.groups(lengths, shard.ids, plan):
            job.between()
            for block in _blocks(job, batching.micro_batch(job.examples, ids, plan)):
                digest.update(block)
                file.write(block)
            advance(len(ids))
    return digest.hexdigest()


def _blocks(job: Build, micro: batching.MicroBatch) -> list[memoryview]:
    """The bytes of each example of a micro-batch, padding left out, in the layout's order."""
    job.staged.model.eval()
    with blocked(job.plan.attention_block), cheap_swiglu():
        boundary = job.staged.frozen(mx.array(micro.tokens_BT), job.cut)
        mx.eval(boundary)
    arrays = to_numpy(boundary, job.layout)
    lengths = job.examples.lengths[micro.ids].tolist()
    return [
        np.ascontiguousarray(array[row, :length]).data.cast("B")
        for row, length in enumerate(lengths)
        for array in arrays
        if length
    ]


def _forward_plan(plan: Plan, lengths: np.ndarray) -> Plan:
    """The plan's padded tokens in as many rows as fit: nothing is kept for a backward pass."""
    widths = batching.widths(lengths, int(lengths.max()))
    return replace(plan, batch_size=MOST_ROWS, widths=widths, compiled=False)
