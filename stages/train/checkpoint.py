"""Checkpoints: all a run needs to go on bit for bit, in `.cache/checkpoints/<fingerprint>/`.

    00000050/  adapters.safetensors  optimizer.safetensors  best.safetensors  state.json
               history.csv  valid.csv  run.csv
    best/00000040.safetensors        the trained arrays of the best validation
    lock, working                    one run per fingerprint

Each is written aside, synced and renamed. state.json holds the SHA-256 of the other files, so a
torn checkpoint is seen and passed over. A checkpoint's best.safetensors is a link to the file in
best/, so it stays whole when a better one replaces that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from stages.core import console, files
from stages.core.errors import UserError
from stages.core.memory.plan import Plan, from_record
from stages.core.model import tensors
from stages.core.update.step import Step
from stages.train import optimizer
from stages.train.state import TrainState

VERSION = 1
WEIGHTS, MOMENTS, BEST = "adapters.safetensors", "optimizer.safetensors", "best.safetensors"
STATE = "state.json"


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint on the disk.

    Attributes:
        folder: Where it lies.
        record: What `TrainState.record` gave.
        plan: The plan it was trained under.
        machine: What else the bits hang on; see `Store.machine`.
    """

    folder: Path
    record: dict[str, Any]
    plan: Plan
    machine: dict[str, Any]


@dataclass
class Store:
    """The checkpoints of one run.

    Attributes:
        folder: `.cache/checkpoints/<fingerprint>`.
        fingerprint: Of the run; a checkpoint of another one is passed over.
        machine: Kept with each checkpoint: OpenBLAS threads, device, memory settings.
    """

    folder: Path
    fingerprint: str
    machine: dict[str, Any] = field(default_factory=dict)
    _held: tuple[int, int] | None = None

    def holds(self, state: TrainState) -> bool:
        """Whether exactly this state was saved or loaded last."""
        return self._held == (state.update, state.evaluated)

    def save(self, state: TrainState, step: Step, keep_last: int) -> Path:
        """Write the checkpoint of this state, then prune older ones.

        Raises:
            UserError: No space is left.
        """
        folder = self.folder / f"{state.update:08d}"
        with files.replacing_folder(folder) as temporary:
            tensors.write(temporary / WEIGHTS, _trained(step.model))
            tensors.write(temporary / MOMENTS, optimizer.flat_state(state.optimizer))
            state.history.write(temporary)
            if state.best is not None:
                _link(self.best_file(state.best.update), temporary / BEST)
            sums = {file.name: files.sha256_file(file) for file in temporary.iterdir()}
            record = {
                "version": VERSION,
                "fingerprint": self.fingerprint,
                "machine": self.machine,
                "plan": step.plan.record(),
                "state": state.record(),
                "sums": sums,
            }
            files.write_json(temporary / STATE, record)
        self._held = (state.update, state.evaluated)
        self._prune(state.update, keep_last)
        return folder

    def latest(self, most: int) -> Saved | None:
        """The newest whole checkpoint of at most `most` updates; bad ones are passed over aloud."""
        files.remove_leftovers(self.folder)
        for folder in reversed(list(self._folders())):
            if int(folder.name) > most:
                continue
            try:
                return self._read(folder)
            except (OSError, UserError, ValueError, KeyError, TypeError) as error:
                why = error.what if isinstance(error, UserError) else error
                console.warn(f"checkpoint of update {int(folder.name)} is passed over: {why}")
        return None

    def load(self, saved: Saved, state: TrainState, model: nn.Module) -> None:
        """Fill state and model from a checkpoint, before anything is compiled over them."""
        state.restore(saved.record)
        state.history.read(saved.folder)
        model.update(tree_unflatten(list(mx.load(str(saved.folder / WEIGHTS)).items())))
        mx.eval(model.trainable_parameters())
        optimizer.restore(state.optimizer, mx.load(str(saved.folder / MOMENTS)))
        if state.best is not None:
            file = self.best_file(state.best.update)
            file.parent.mkdir(exist_ok=True)
            file.unlink(missing_ok=True)
            _link(saved.folder / BEST, file)
        self._held = (state.update, state.evaluated)

    def keep_best(self, state: TrainState, model: nn.Module) -> None:
        """Write the trained arrays of `state.best`, and remove those of an earlier one."""
        file = self.best_file(state.best.update)
        with files.replacing(file) as temporary:
            tensors.write(temporary, _trained(model))
        for other in file.parent.glob("*.safetensors"):
            if other != file:
                other.unlink()

    def best_file(self, update: int) -> Path:
        """Where the trained arrays of the best validation lie while the run goes on."""
        return self.folder / "best" / f"{update:08d}.safetensors"

    def clear(self) -> None:
        """Remove all checkpoints; the locks stay."""
        for folder in self._folders():
            shutil.rmtree(folder)
        shutil.rmtree(self.folder / "best", ignore_errors=True)
        files.remove_leftovers(self.folder)

    def _folders(self) -> Iterator[Path]:
        """Checkpoint folders, oldest first."""
        if not self.folder.exists():
            return iter(())
        return iter(sorted(x for x in self.folder.iterdir() if x.is_dir() and x.name.isdigit()))

    def _prune(self, update: int, keep_last: int) -> None:
        """Keep the last ones up to `update`; later ones are of the same run, stopped later once."""
        done = [folder for folder in self._folders() if int(folder.name) <= update]
        for folder in done[:-keep_last]:
            shutil.rmtree(folder)

    def _read(self, folder: Path) -> Saved:
        record = files.read_json(folder / STATE)
        if record["version"] != VERSION:
            raise ValueError(f"it is of version {record['version']}, not {VERSION}")
        if record["fingerprint"] != self.fingerprint:
            raise ValueError(f"it belongs to another run ({record['fingerprint']})")
        for name, expected in record["sums"].items():
            if files.sha256_file(folder / name) != expected:
                raise ValueError(f"{name} is damaged")
        return Saved(folder, record["state"], from_record(record["plan"]), record["machine"])


def bytes_on_disk(model: nn.Module, moments: dict[str, mx.array], keep_last: int) -> int:
    """The most that the checkpoints of a run take: kept ones, one in the making, two best ones."""
    weights = sum(x.nbytes for x in _trained(model).values())
    state = sum(x.nbytes for x in moments.values())
    return (keep_last + 1) * (weights + state) + 2 * weights


def _trained(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.trainable_parameters()))


def _link(source: Path, target: Path) -> None:
    """A second name for a file; a copy where the disk has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
