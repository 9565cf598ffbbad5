"""What a run really has to compute: the shapes of its micro-batches under a plan. No MLX."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from stages.core.config.settings import Settings
from stages.core.memory.fit import Shape, stack
from stages.core.memory.plan import Plan
from stages.core.memory.rule import rows_per_worker, workers
from stages.core.tables import Examples
from stages.core.update import batching

MOST_VISITS = 20_000
"""Examples that are looked at; longer runs are judged by their start and bounded by width."""


@dataclass(frozen=True)
class Work:
    """The examples of a run and the order they come in.

    Attributes:
        lengths, targets: Per training example, (N,).
        valid_lengths, valid_targets: Per validation example.
        batches: Ids of each update that is looked at, one worker's share.
        updates: Of the whole run.
        validations: Of the whole run, each over all validation examples.
        splits: The examples themselves, `train` and `valid`.
        rows: Most examples of an update that one worker trains.
    """

    lengths: np.ndarray
    targets: np.ndarray
    valid_lengths: np.ndarray
    valid_targets: np.ndarray
    batches: list[np.ndarray]
    updates: int
    validations: int
    rows: int
    splits: tuple[Examples, Examples]

    @property
    def longest(self) -> int:
        """Tokens of the longest example, trained or validated."""
        return int(max(self.lengths.max(), self.valid_lengths.max(initial=0)))

    @property
    def complete(self) -> bool:
        """Every update of the run is among `batches`."""
        return len(self.batches) == self.updates

    def shapes(self, plan: Plan) -> Counter[Shape]:
        """Shapes of the micro-batches of `batches` under a plan, with how often each comes."""
        found: Counter[Shape] = Counter()
        for ids in self.batches:
            for part in batching.groups(self.lengths, ids, plan):
                found[shape(self.lengths[part], self.targets[part], plan)] += 1
        return found

    def load(self, plan: Plan) -> Load:
        """The work as this plan cuts it."""
        counts = self.shapes(plan)
        shapes = sorted({*counts, *self.extremes(plan)})
        return Load(self, shapes, stack(shapes), np.array([counts[shape] for shape in shapes]))

    def extremes(self, plan: Plan) -> set[Shape]:
        """Shapes beside `shapes` that could need more: what was not looked at, and validation."""
        found = set() if self.complete else _bounds(self.lengths, self.targets, plan)
        longest = self.lengths.max()
        if self.valid_lengths.max(initial=0) > longest:
            found |= {
                bound
                for bound in _bounds(self.valid_lengths, self.valid_targets, plan)
                if bound.width > batching.width_for(int(longest), plan)
            }
        return found


@dataclass(frozen=True)
class Load:
    """The work as one plan cuts it.

    Attributes:
        work: What is cut.
        shapes: Different shapes of micro-batches.
        stacked: The same as arrays (S,).
        counts: How often each comes in `work.batches`, (S,); 0 for what could come beside them.
    """

    work: Work
    shapes: list[Shape]
    stacked: Shape
    counts: np.ndarray


def work(settings: Settings, examples: Examples, valid: Examples) -> Work:
    """The work of the run that these settings describe."""
    train = settings.train
    size, count = train.effective_batch_size, len(examples)
    updates = batching.updates_in_run(count, size, train.epochs, train.updates)
    batches: list[np.ndarray] = []
    for epoch in range(math.ceil(updates / batching.updates_per_epoch(count, size))):
        if len(batches) * size >= MOST_VISITS:
            break
        batches += batching.effective_batches(count, size, train.seed, epoch)
    most = min(updates, max(1, MOST_VISITS // size))
    return Work(
        lengths=examples.lengths,
        targets=examples.targets,
        valid_lengths=valid.lengths,
        valid_targets=valid.targets,
        batches=[ids[:: workers(settings)] for ids in batches[:most]],
        updates=updates,
        validations=validations(updates, train.updates_per_eval) if len(valid) else 0,
        rows=min(rows_per_worker(settings), count),
        splits=(examples, valid),
    )


def validations(updates: int, every: int | None) -> int:
    """How often a run validates: every so many updates, and at its end."""
    return math.ceil(updates / every) if every else 1


def shape(lengths: np.ndarray, targets: np.ndarray, plan: Plan) -> Shape:
    """The shape of a micro-batch of these examples."""
    width = batching.width_for(int(lengths.max()), plan)
    return Shape(batching.rows_of(len(lengths), width, plan), width, max(1, int(targets.sum())))


def _bounds(lengths: np.ndarray, targets: np.ndarray, plan: Plan) -> set[Shape]:
    """For each width, as many rows as it may have, with the most targets there are."""
    found, below = set(), 0
    for width in sorted({*plan.widths, int(lengths.max())}):
        inside = (lengths > below) & (lengths <= width)
        below = max(below, width)
        if inside.any():
            rows = batching.most_rows(width, plan)
            most = np.sort(targets[inside])[::-1][:rows]
            found.add(Shape(rows, width, max(1, int(most.sum()))))
    return found
