"""The processes of one run (`run.launch`) and what they tell each other.

Every rank holds the whole model, computes its share of an update's micro-batches, and applies the
same optimizer step to the same sum. The first one alone writes. What is said between them:

    together   a few numbers of each rank, to all: losses, and whether anybody was asked to end
    sum        gradients, added in float32, once per update
    tell       what only the first one knows: the plan, a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from stages.core import console
from stages.core.config.schema import Launch
from stages.core.entry import Stopped
from stages.core.errors import RunFailed, UserError
from stages.core.memory.plan import Plan, from_record
from stages.core.tables import Examples
from stages.core.update import batching
from stages.core.update.step import Gradient
from stages.train.checkpoint import Store
from stages.train.ranks.alone import Alone, Micros
from stages.train.ranks.follower import Follower
from stages.train.ranks.messages import Messages, in_order
from stages.train.ranks.shares import shares
from stages.train.state import TrainState
from stages.train.stopping import Stop

ROUNDING = 1e-4
"""Relative difference of two ranks' arrays that different machines may explain."""


class Ranks(Alone):
    """One rank of several.

    Args:
        group: Of `mx.distributed`.
    """

    def __init__(self, group: Any) -> None:
        self.messages = Messages(group)
        self.rank, self.size = self.messages.rank, self.messages.size
        self.first = self.messages.first
        self._plan: Plan | None = None

    def micros(self, examples: Examples, ids: np.ndarray, plan: Plan) -> Micros:
        """See `Alone`; cut by the plan that was agreed, whatever a check has switched off here."""
        cut = self._plan or plan
        return [
            (share.index, batching.micro_batch(examples, share.ids, cut))
            for share in shares(examples.lengths, ids, cut, self.size)
            if share.rank == self.rank
        ]

    def asked(self, stop: Stop) -> bool:
        """See `Alone`: the others learn it in `together`."""
        stop.beat()
        return stop.number is not None

    def together(self, stop: Stop, *numbers: float) -> np.ndarray:
        """See `Alone`."""
        found = self.messages.gathered(float(stop.number or 0), *numbers)
        if found[:, 0].any():
            raise Stopped(int(found[:, 0].max()))
        return found[:, 1:]

    def sum(self, gradient: Gradient) -> Gradient:
        """See `Alone`."""
        return self.messages.sum(gradient)

    def agreed(self, make: Callable[[], Plan]) -> Plan:
        """See `Alone`."""
        record = make().record() if self.first else None
        self._plan = from_record(self.messages.tell(record))
        return self._plan

    def require_equal(self, what: str, value: str) -> None:
        """Refuse ranks that are about to do different things.

        Raises:
            UserError: `value` is another one on some rank.
        """
        expected = self.messages.tell(value)
        differ = np.flatnonzero(self.messages.gathered(value != expected)[:, 0]).tolist()
        if differ:
            raise UserError(
                f"The processes of this run differ in {what}",
                where="run.launch.hosts",
                found=f"another one at rank {', '.join(map(str, differ))} (counted from 0)",
                expected=str(expected),
                fix="bring data/, params.yaml and the code of every host to the same state",
            )

    def store(self, folder: Path, machine: Mapping[str, Any]) -> Store:
        """See `Alone`; others than the first rank write none."""
        if self.first:
            return super().store(folder, machine)
        return Follower(folder / f"rank{self.rank}", folder.name, dict(machine))

    def start_equal(self, state: TrainState, model: nn.Module, store: Store) -> None:
        """See `Alone`."""
        record = self.messages.tell(state.record() if self.first else None)
        if not self.first:
            state.restore(record)
            store.follow(state)
        self._take_over(model, state.optimizer)

    def keep_equal(self, model: nn.Module, optimizer: Any) -> None:
        """See `Alone`. Machines of different kinds may round differently: then the first rank's
        arrays are taken over, aloud."""
        sums = self.messages.gathered(_checksum(model))[:, 0]
        if (sums == sums[0]).all():
            return
        mine = dict(tree_flatten(model.trainable_parameters()))
        self._take_over(model, optimizer)
        theirs = dict(tree_flatten(model.trainable_parameters()))
        off = self.messages.gathered(_distance(mine, theirs))[:, 0]
        if not off.max() <= ROUNDING:  # not so for NaN
            raise RunFailed(
                "The trained arrays of the processes have come apart",
                found=f"relative difference {off.max():.1e} at rank {int(off.argmax())}",
                expected=f"at most {ROUNDING:.0e}",
                fix="run again: training goes on from its last checkpoint",
            )
        console.warn(f"ranks differed by rounding ({off.max():.1e}); the first one's arrays count")

    def most(self, number: float) -> float:
        """See `Alone`."""
        return float(self.messages.gathered(number).max())

    def barrier(self) -> None:
        """See `Alone`."""
        self.messages.gathered(0.0)

    def _take_over(self, model: nn.Module, optimizer: Any) -> None:
        """The first rank's trained arrays and moments, on all ranks."""
        model.update(self.messages.firsts(model.trainable_parameters()))
        optimizer.state = self.messages.firsts(optimizer.state)
        mx.eval(model.trainable_parameters(), optimizer.state)


def join(launch: Launch) -> Ranks:
    """Become one of the processes that `stages.core.machine.launch` started.

    Raises:
        UserError: This MLX has no such backend.
        RunFailed: The others cannot be reached.
    """
    if not mx.distributed.is_available(launch.backend):
        raise UserError(
            "This MLX does not have the backend",
            where="run.launch.backend",
            found=launch.backend,
            expected="one that it was built with",
            fix="run.launch.backend=ring works on every device",
        )
    try:
        return Ranks(mx.distributed.init(strict=True, backend=launch.backend))
    except RuntimeError as error:
        raise RunFailed(
            "The processes of this run cannot reach each other",
            where="run.launch.hosts",
            found=error,
            expected=f"{launch.workers()} processes",
            fix="see that every host runs and that no firewall stands between them",
        ) from error


def _checksum(model: nn.Module) -> float:
    """A number of at most 32 bits that hangs on every bit of the trained arrays."""
    total = 0
    for place, (_, x) in enumerate(in_order(model.trainable_parameters()), start=1):
        bits = x.view(mx.uint32 if x.dtype.size == 4 else mx.uint16).astype(mx.uint32)
        total += place * int(bits.sum().item())
    return float(total % 2**32)


def _distance(mine: dict[str, mx.array], theirs: dict[str, mx.array]) -> float:
    """‖mine − theirs‖ over ‖theirs‖, over all arrays together."""
    wide = lambda x: x.astype(mx.float32)
    difference = sum(mx.square(wide(mine[k]) - wide(x)).sum().item() for k, x in theirs.items())
    whole = sum(mx.square(wide(x)).sum().item() for x in theirs.values())
    return float(np.sqrt(difference / max(whole, np.finfo(np.float32).tiny)))
