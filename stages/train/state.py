"""The one explicit state of a run: all that changes from update to update, and what an update
computes before anything is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stages.train.history import History

if TYPE_CHECKING:
    import mlx.optimizers as optim
    import numpy as np

    from stages.core.update.step import Gradient


@dataclass(frozen=True)
class Outcome:
    """Loss and gradient of one update's examples, before anything is applied.

    Attributes:
        loss: Per target, nats.
        gradient: Summed over micro-batches, float32.
        ids: The examples.
        targets, tokens: How many, without padding.
        bad: Examples of micro-batches whose loss is not finite.
    """

    loss: float
    gradient: Gradient
    ids: np.ndarray
    targets: int
    tokens: int
    bad: tuple[int, ...]


@dataclass(frozen=True)
class Best:
    """The best validation so far."""

    update: int
    loss: float


@dataclass
class TrainState:
    """Where a run stands, always between two updates.

    Attributes:
        optimizer: Its moments, and its step count (updates applied, without skipped ones).
        update: Updates done.
        epoch, position: The next update takes effective batch `position` of this epoch.
        evaluated: The last update that was validated.
        best: The best validation so far; its arrays lie in the checkpoint folder.
        stale: Validations since then.
        skipped: Updates left out because their loss or gradient was not finite.
        history: All rows so far.
        peaks: Largest peak memory of each phase, in GB; telemetry.
        resumed: Updates at which the run went on after a stop; telemetry.
    """

    optimizer: optim.Optimizer
    update: int = 0
    epoch: int = 0
    position: int = 0
    evaluated: int = 0
    best: Best | None = None
    stale: int = 0
    skipped: int = 0
    history: History = field(default_factory=History)
    peaks: dict[str, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)

    def advance(self, batches: int) -> None:
        """Count one update of an epoch of `batches` effective batches."""
        self.update += 1
        self.position += 1
        if self.position == batches:
            self.epoch, self.position = self.epoch + 1, 0

    def note_peaks(self, peaks: Mapping[str, float]) -> None:
        """Keep the largest peak of each phase."""
        for name, peak in peaks.items():
            self.peaks[name] = max(peak, self.peaks.get(name, 0.0))

    def record(self) -> dict[str, Any]:
        """Everything but the optimizer and the rows, as JSON-like values."""
        kept = ("update", "epoch", "position", "evaluated", "stale", "skipped", "peaks", "resumed")
        best = None if self.best is None else asdict(self.best)
        return {"best": best, **{name: getattr(self, name) for name in kept}}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take what `record` gave.

        Raises:
            KeyError, TypeError: It was written by another version.
        """
        for name, value in record.items():
            if not hasattr(self, name):
                raise KeyError(name)
            setattr(self, name, value)
        self.best = None if record["best"] is None else Best(**record["best"])
