"""Around every step of the child: a note for the supervisor, and another try after out of memory.

The gradient phase changes no weight and no moment, so an update (or a validation) that ran out of
memory there is simply done again in this process, with half the micro-batch. What cannot go on here
(other ways of computing, which want their check first; buffers that only a fresh process frees) is
handed over to the supervisor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx
import numpy as np

from stages.core import console
from stages.core.memory import recovery
from stages.core.memory.marker import StepMarker
from stages.core.memory.plan import Plan
from stages.core.memory.pressure import Pressure
from stages.core.tables import Examples
from stages.core.update import batching
from stages.train.recovery.ledger import STEP, HandOver, Ledger, told

if TYPE_CHECKING:
    from stages.core.update.step import Step
    from stages.train.state import Outcome

Result = TypeVar("Result")
WAYS = ("recompute", "recompute_place", "attention_block", "compiled")
"""Parts of a plan that are checked against the plain way before they are used."""


class Unguarded:
    """Steps of a job that nobody watches: in tests and comparisons."""

    def update(self, _number: int, _ids: np.ndarray, work: Callable[[], Outcome]) -> Outcome:
        """Loss and gradient of an update."""
        return work()

    def validation(self, _number: int, work: Callable[[], float]) -> float:
        """Loss of the valid set."""
        return work()


class Guard(Unguarded):
    """Watches over the steps of one session.

    Args:
        step: Its plan shrinks after a failure.
        examples, valid: What is trained and validated.
        ledger: Of the run; its plan is the step's.
        check: (bytes, tokens) that the check of the plan took beside what rests in memory.
        alone: No other process waits for this one's part of a step.
    """

    def __init__(
        self,
        step: Step,
        examples: Examples,
        valid: Examples,
        ledger: Ledger,
        check: tuple[int, int] = (0, 1),
        *,
        alone: bool = True,
    ) -> None:
        self.step = step
        self.alone = alone
        self.ledger = ledger
        self.marker = StepMarker(ledger.folder / STEP)
        self._examples, self._valid = examples, valid
        self._known = check
        self._pressure = Pressure()

    def update(self, number: int, ids: np.ndarray, work: Callable[[], Outcome]) -> Outcome:
        """Loss and gradient of an update, done again with a smaller plan where memory runs out.

        Args:
            number: Of the update.
            ids: Its examples.
            work: Cuts them under the step's plan; may be called more than once.

        Raises:
            HandOver: A fresh process has to go on.
        """
        started = time.monotonic()
        outcome = self._done(number, self._examples.lengths[ids], work)
        warning = self._pressure.look(outcome.tokens / (time.monotonic() - started))
        if warning:
            console.warn(warning)
        return outcome

    def validation(self, number: int, work: Callable[[], float]) -> float:
        """Loss of the valid set after update `number`, done again likewise.

        Raises:
            HandOver: A fresh process has to go on.
        """
        return self._done(number, self._valid.lengths, work)

    def _done(self, number: int, lengths: np.ndarray, work: Callable[[], Result]) -> Result:
        while True:
            rows, width = largest(lengths, self.step.plan)
            before = mx.get_active_memory()
            try:
                with self.marker.around(number, rows, width, self._needed(rows * width, before)):
                    result = work()
            except Exception as error:
                death = recovery.of_exception(error)
                if death is None:
                    raise
            else:
                self._learn(mx.get_peak_memory() - before, rows * width)
                return result
            self._shrink(death, number, rows, width)

    def _shrink(self, death: recovery.Death, number: int, rows: int, width: int) -> None:
        """Go on in this process with a smaller plan.

        Raises:
            HandOver: Only a fresh process can.
        """
        gc.collect()
        mx.clear_cache()
        again = self.alone and death.retry == "smaller"
        after = self.ledger.next(rows, width) if again else None
        if after is None or any(getattr(after, x) != getattr(self.step.plan, x) for x in WAYS):
            raise HandOver(death, self.marker.last)
        self.ledger.add(death, number, after)
        console.warn(told(self.ledger.events[-1]))
        self.step.plan = after

    def _needed(self, tokens: int, active: int) -> int:
        """Bytes that a step of so many padded tokens will take beside what is in use."""
        seen, size = self._known
        predicted = int((self.step.plan.predicted_peak_gb or 0.0) * 1e9) - active
        return max(predicted, int(seen * max(1.0, tokens / size)))

    def _learn(self, peak: int, tokens: int) -> None:
        if peak > self._known[0]:
            self._known = peak, tokens


def largest(lengths: np.ndarray, plan: Plan) -> tuple[int, int]:
    """(rows, width) of the micro-batch with most padded tokens that a plan cuts these examples to.

    Args:
        lengths: Tokens of each example, (N,), N at least 1.
    """
    if len(lengths) > 1024:  # the cut itself would take time
        width = batching.width_for(int(lengths.max()), plan)
        return min(batching.most_rows(width, plan), len(lengths)), width
    shapes = []
    for part in batching.groups(lengths, np.arange(len(lengths)), plan):
        width = batching.width_for(int(lengths[part].max()), plan)
        shapes.append((len(part), width))
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
