"""The checkpoints of a rank that is not the first one: there are none."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx import nn

from stages.core.update.step import Step
from stages.train.checkpoint import Saved, Store
from stages.train.state import TrainState


class Follower(Store):
    """The store of a rank that writes no checkpoint, though it knows when the first one does."""

    def follow(self, state: TrainState) -> None:
        """The run starts from this state: a checkpoint's, which the first rank holds, or none."""
        if state.update:
            self._held = (state.update, state.evaluated)

    def save(self, state: TrainState, step: Step, keep_last: int) -> Path:
        """As if it were saved."""
        self._held = (state.update, state.evaluated)
        return self.folder / f"{state.update:08d}"

    def latest(self, most: int) -> Saved | None:
        """None: the first rank tells what to go on from."""

    def keep_best(self, state: TrainState, model: nn.Module) -> None:
        """The first rank does."""

    def clear(self) -> None:
        """Remove the folder: nothing in it is needed."""
        shutil.rmtree(self.folder, ignore_errors=True)
