"""The activations of some splits, ready to be read: found, mended or built; or off, in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from stages.core import console, files, paths
from stages.core.activations import build as building
from stages.core.activations import identity, shards
from stages.core.activations.build import Build
from stages.core.activations.evict import Use, make_room
from stages.core.activations.layout import layout
from stages.core.activations.reader import Activations
from stages.core.activations.shards import Shard
from stages.core.activations.size import limit_gb, told
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.layers.staged import StagedModel, UnsupportedModel
from stages.core.machine.lock import locked
from stages.core.memory.plan import Plan
from stages.core.model.manifest import Manifest
from stages.core.tables import Examples

WAIT_S = 7 * 24 * 3600.0
"""For another run that builds the same activations."""


@dataclass(frozen=True)
class Source:
    """What makes activations.

    Attributes:
        staged: The model's parts, adapters attached; weights may still be unread.
        cut: The first trained layer; 0 where nothing is frozen.
        manifest: Of the base model.
        plan: How the frozen layers are run.
        memory: Settings; the limit is used.
        device_kind: `cpu`, `cuda` or `metal`.
    """

    staged: StagedModel
    cut: int
    manifest: Manifest
    plan: Plan
    memory: schema.Memory
    device_kind: str


def prepare(
    source: Source,
    splits: Mapping[str, Examples],
    between: Callable[[], None] = lambda: None,
) -> dict[str, Activations] | None:
    """The activations of these splits, all or none.

    Splits that are on the disk are verified by their checksums; damaged shards are made again.
    Others are built, by one process: a second one that wants the same waits. `close` each.

    Args:
        splits: By name; those without examples are left out of the result.
        between: Called between micro-batches of a build; may raise.

    Returns:
        None where the cache is off: nothing is frozen, the architecture can't be cut there, or the
        disk has no room. One line says so.
    """
    if source.cut == 0:
        return _off("no layer's output stays the same during training")
    try:
        jobs = _jobs(source, splits, between)
    except UnsupportedModel as error:
        return _off(error.reason)
    with ExitStack() as held:
        uses = {name: held.enter_context(closing(Use(job.folder))) for name, job in jobs.items()}
        missing = {name: _missing(job) for name, job in jobs.items()}
        # Two splits with the same tokens share a folder.
        unmade = {job.folder: job for name, job in jobs.items() if missing[name]}
        if unmade and (reason := _make(list(unmade.values()), source.memory)):
            return _off(reason)
        held.pop_all()
    for name, job in jobs.items():
        if not missing[name]:
            console.say(f"activations of {name}: {told(job.bytes)}, on the disk from before")
    return {
        name: Activations(job.folder, job.layout, job.shards, job.examples.lengths, uses[name])
        for name, job in jobs.items()
    }


def _jobs(
    source: Source, splits: Mapping[str, Examples], between: Callable[[], None]
) -> dict[str, Build]:
    fields = layout(source.staged, source.cut)
    return {
        name: Build(
            folder=identity.folder(source.manifest, source.cut, examples, source.device_kind),
            name=name,
            staged=source.staged,
            cut=source.cut,
            layout=fields,
            shards=shards.cut(examples.lengths, fields.bytes),
            examples=examples,
            plan=source.plan,
            between=between,
        )
        for name, examples in splits.items()
        if len(examples)
    }


def _missing(job: Build) -> list[Shard]:
    """The shards that are not there as they were written."""
    if not job.folder.is_dir():
        return list(job.shards)
    return shards.damaged(job.folder, job.shards, building.read_manifest(job.folder, job))


def _make(jobs: Sequence[Build], memory: schema.Memory) -> str:
    """Make what is missing, once no other process does; "", or why there is no room for it."""
    with ExitStack() as held:
        for job in sorted(jobs, key=lambda job: job.folder):
            lock = job.folder.with_suffix(".lock")
            held.enter_context(locked(lock, f"the activations of {job.name}", WAIT_S))
        missing = [_missing(job) for job in jobs]
        need = sum(shard.bytes for bad in missing for shard in bad)
        if not need:
            return ""
        limit = limit_gb(memory.activation_cache_limit_gb)
        if reason := make_room(paths.cache("activations"), need, limit):
            return reason
        try:
            for job, bad in zip(jobs, missing, strict=True):
                if bad:
                    _build_or_mend(job, bad)
        except (UserError, OSError) as error:
            if not files.is_disk_full(error.__cause__ or error):
                raise
            for job in jobs:
                shutil.rmtree(job.part, ignore_errors=True)
            return "no space is left on the disk; what was written of it is removed"
    return ""


def _build_or_mend(job: Build, missing: list[Shard]) -> None:
    if len(missing) < len(job.shards):
        console.warn(f"activations of {job.name}: {len(missing)} damaged files are made again")
        building.mend(job, missing)
        return
    tokens = int(job.examples.offsets[-1])
    console.say(
        f"activations of {job.name}: {told(job.bytes)} for {tokens} tokens in"
        f" {len(job.examples)} examples below layer {job.cut}, computed once;"
        f" {files.free_gb(job.folder):.3g} GB free"
    )
    building.build(job)


def _off(reason: str) -> None:
    console.warn(f"activation cache is off: {reason}")
