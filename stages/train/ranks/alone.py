"""A run of one process: what every run asks of its ranks, where nothing is said to anybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mlx import nn

from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from stages.core.update import batching
from stages.core.update.batching import MicroBatch
from stages.core.update.step import Gradient
from stages.train.checkpoint import Store
from stages.train.state import TrainState
from stages.train.stopping import Stop

Micros = list[tuple[int, MicroBatch]]
"""A rank's micro-batches of an update, each with its place among all of them."""


class Alone:
    """A run of one process.

    Attributes:
        rank, size: Which one of how many.
        first: Whether this one writes.
    """

    rank, size = 0, 1
    first = True

    def micros(self, examples: Examples, ids: np.ndarray, plan: Plan) -> Micros:
        """The micro-batches of these examples that this rank computes."""
        return list(enumerate(batching.micro_batches(examples, ids, plan)))

    def asked(self, stop: Stop) -> bool:
        """Whether to leave out the rest of this rank's share, as somebody asked to end.

        Raises:
            Stopped: Where no other rank has to hear of it first.
        """
        stop.check()
        return False

    def together(self, stop: Stop, *numbers: float) -> np.ndarray:
        """The numbers of every rank, float64 (ranks, numbers).

        Raises:
            Stopped: On every rank, where any of them was asked to end.
        """
        del stop
        return np.array([numbers], np.float64)

    def sum(self, gradient: Gradient) -> Gradient:
        """The sum over all ranks, in float32."""
        return gradient

    def agreed(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the first rank makes."""
        return make()

    def store(self, folder: Path, machine: Mapping[str, Any]) -> Store:
        """The checkpoints of the run; see `Store`."""
        return Store(folder, folder.name, dict(machine))

    def start_equal(self, state: TrainState, model: nn.Module, store: Store) -> None:
        """Take over state, trained arrays and moments of the first rank."""

    def keep_equal(self, model: nn.Module, optimizer: Any) -> None:
        """See that the trained arrays are the same on every rank.

        Raises:
            RunFailed: They are not.
        """

    def most(self, number: float) -> float:
        """The largest number of any rank."""
        return number

    def barrier(self) -> None:
        """Wait until every rank is here."""


ALONE = Alone()
