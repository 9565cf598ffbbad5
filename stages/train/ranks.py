"""The processes of one run (`run.launch`) and what they tell each other.

Every rank holds the whole model, computes its share of an update's micro-batches, and applies the
same optimizer step to the same sum. The first one alone writes. What is said between them:

    together   a few numbers of each rank, to all: losses, and whether anybody was asked to end
    sum        gradients, added in float32, once per update
    tell       what only the first one knows: the plan, a checkpoint

`Alone` is the run of one process: nothing is said to anybody.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from stages.core import console
from stages.core.config.schema import Launch
from stages.core.entry import Stopped
from stages.core.errors import RunFailed, UserError
from stages.core.machine.launch import LOST
from stages.core.memory.plan import Plan, from_record
from stages.core.tables import Examples
from stages.core.update import batching
from stages.core.update.batching import MicroBatch
from stages.core.update.step import Gradient
from stages.train.checkpoint import Store
from stages.train.follower import Follower
from stages.train.shares import shares
from stages.train.state import TrainState
from stages.train.stopping import Stop

BYTES_AT_ONCE = 32 * 2**20
"""Small arrays are joined up to this size: each message costs a round of the network."""
ROUNDING = 1e-4
"""Relative difference of two ranks' arrays that different machines may explain."""

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


class Ranks(Alone):
    """One rank of several.

    Args:
        group: Of `mx.distributed`.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.first = self.rank == 0
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
        found = self._gathered(float(stop.number or 0), *numbers)
        if found[:, 0].any():
            raise Stopped(int(found[:, 0].max()))
        return found[:, 1:]

    def sum(self, gradient: Gradient) -> Gradient:
        """See `Alone`; few large messages in place of many small ones."""
        names, arrays = zip(*_in_order(gradient), strict=True)
        summed: list[mx.array] = []
        for part in _joined(arrays):
            flat = mx.concatenate([x.astype(mx.float32).reshape(-1) for x in part])
            flat = self._all_sum(flat)
            ends = np.cumsum([x.size for x in part])[:-1].tolist()
            pieces = mx.split(flat, ends) if ends else [flat]
            summed += [piece.reshape(x.shape) for piece, x in zip(pieces, part, strict=True)]
        mx.eval(summed)
        return tree_unflatten(list(zip(names, summed, strict=True)))

    def tell(self, value: Any) -> Any:
        """The first rank's JSON-like value, on all ranks."""
        data = json.dumps(value).encode() if self.first else b""
        size = int(self._gathered(len(data))[0, 0])
        padded = np.zeros(-(-size // 4), np.int32)
        padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        told = np.array(self._all_sum(mx.array(padded)))
        return json.loads(told.view(np.uint8)[:size].tobytes())

    def agreed(self, make: Callable[[], Plan]) -> Plan:
        """See `Alone`."""
        record = make().record() if self.first else None
        self._plan = from_record(self.tell(record))
        return self._plan

    def require_equal(self, what: str, value: str) -> None:
        """Refuse ranks that are about to do different things.

        Raises:
            UserError: `value` is another one on some rank.
        """
        expected = self.tell(value)
        differ = [rank for rank, bad in enumerate(self._gathered(value != expected)[:, 0]) if bad]
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
        record = self.tell(state.record() if self.first else None)
        if not self.first:
            state.restore(record)
            store.follow(state)
        self._take_over(model, state.optimizer)

    def keep_equal(self, model: nn.Module, optimizer: Any) -> None:
        """See `Alone`. Machines of different kinds may round differently: then the first rank's
        arrays are taken over, aloud."""
        sums = self._gathered(_checksum(model))[:, 0]
        if (sums == sums[0]).all():
            return
        mine = dict(tree_flatten(model.trainable_parameters()))
        self._take_over(model, optimizer)
        theirs = dict(tree_flatten(model.trainable_parameters()))
        off = self._gathered(_distance(mine, theirs))[:, 0]
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
        return float(self._gathered(number).max())

    def barrier(self) -> None:
        """See `Alone`."""
        self._gathered(0.0)

    def _gathered(self, *numbers: float) -> np.ndarray:
        """Every rank's numbers, bit by bit: float64 (ranks, numbers)."""
        mine = mx.array(np.array(numbers, np.float64).view(np.int32))
        with _reaching():
            found = mx.distributed.all_gather(mine, group=self.group)
            mx.eval(found)
        return np.array(found).view(np.float64).reshape(self.size, len(numbers))

    def _all_sum(self, x: mx.array) -> mx.array:
        mx.eval(x)
        with _reaching():
            found = mx.distributed.all_sum(x, group=self.group)
            mx.eval(found)
        return found

    def _take_over(self, model: nn.Module, optimizer: Any) -> None:
        """The first rank's trained arrays and moments, on all ranks."""
        model.update(self._firsts(model.trainable_parameters()))
        optimizer.state = self._firsts(optimizer.state)
        mx.eval(model.trainable_parameters(), optimizer.state)

    def _firsts(self, tree: Any) -> Any:
        """The first rank's tree. Its shapes and types go ahead: an optimizer's state may have
        others after some updates than at the start."""
        mine = dict(_in_order(tree))
        described = [[name, x.shape, str(x.dtype).split(".")[-1]] for name, x in mine.items()]
        found = []
        for name, shape, dtype in self.tell(described):
            x = mine[name] if self.first else mx.zeros(shape, getattr(mx, dtype))
            found.append((name, self._all_sum(x)))
        return tree_unflatten(found)


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


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """End quietly where another rank is gone: who started them all says which one, and why."""
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(LOST) from error


def _in_order(tree: Any) -> list[tuple[str, mx.array]]:
    """The arrays of a tree by name: what came from a file has another order than what was made."""
    return sorted(tree_flatten(tree), key=lambda entry: entry[0])


def _joined(arrays: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    """Consecutive arrays of at most `BYTES_AT_ONCE` together, or one larger array alone."""
    part: list[mx.array] = []
    for x in arrays:
        if part and 4 * (sum(y.size for y in part) + x.size) > BYTES_AT_ONCE:
            yield part
            part = []
        part.append(x)
    yield part


def _checksum(model: nn.Module) -> float:
    """A number of at most 32 bits that hangs on every bit of the trained arrays."""
    total = 0
    for place, (_, x) in enumerate(_in_order(model.trainable_parameters()), start=1):
        bits = x.view(mx.uint32 if x.dtype.size == 4 else mx.uint16).astype(mx.uint32)
        total += place * int(bits.sum().item())
    return float(total % 2**32)


def _distance(mine: dict[str, mx.array], theirs: dict[str, mx.array]) -> float:
    """‖mine − theirs‖ over ‖theirs‖, over all arrays together."""
    wide = lambda x: x.astype(mx.float32)
    difference = sum(mx.square(wide(mine[k]) - wide(x)).sum().item() for k, x in theirs.items())
    whole = sum(mx.square(wide(x)).sum().item() for x in theirs.values())
    return float(np.sqrt(difference / max(whole, np.finfo(np.float32).tiny)))
