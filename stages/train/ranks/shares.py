"""Who computes what of an update: micro-batches of about equal cost for each rank.

Every rank makes the same cut and the same assignment by itself. The cost of a micro-batch is its
padded tokens, and what starting one costs. Plain NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from stages.core.memory.plan import Plan
from stages.core.update import batching

EVEN = 1.05
"""A cut whose dearest rank costs at most this many times the mean is good enough."""
FINER = (1.0, 0.75, 0.5, 0.25)
"""Parts of a rank's share of the padded tokens that a micro-batch may have in a finer cut."""


@dataclass(frozen=True)
class Share:
    """One micro-batch of an update.

    Attributes:
        index: Its place among all micro-batches of the update.
        ids: Its examples.
        rank: Who computes it.
    """

    index: int
    ids: np.ndarray
    rank: int


def shares(lengths: np.ndarray, ids: np.ndarray, plan: Plan, ranks: int) -> list[Share]:
    """All micro-batches of an update with their ranks; a rank may get none.

    The plan's own cut where that divides evenly; else the finer one of a few that ends earliest. No
    cut has a micro-batch larger than the plan allows.

    Args:
        lengths: Tokens of every example of the split, (N,).
        ids: The examples of the update, in any order.
    """
    plan = replace(plan, batch_size=min(plan.batch_size, math.ceil(len(ids) / ranks)))
    best = _assigned(lengths, ids, plan, ranks)
    whole = sum(best[1])
    for part in FINER:
        if max(best[1]) <= EVEN * whole / ranks:
            break
        tokens = max(1, int(part * whole / ranks))
        finer = replace(plan, batch_tokens=min(plan.batch_tokens, tokens))
        best = min(best, _assigned(lengths, ids, finer, ranks), key=lambda found: max(found[1]))
    return best[0]


def _assigned(
    lengths: np.ndarray, ids: np.ndarray, plan: Plan, ranks: int
) -> tuple[list[Share], list[int]]:
    """A plan's cut, the dearest micro-batches given away first, each to who has least so far.

    Returns:
        The micro-batches in the order of the cut, and the cost of each rank.
    """
    parts = batching.groups(lengths, ids, plan)
    costs = [_cost(lengths, part, plan) for part in parts]
    loads, owners = [0] * ranks, [0] * len(parts)
    for place in sorted(range(len(parts)), key=lambda i: (-costs[i], i)):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    return [Share(i, part, owners[i]) for i, part in enumerate(parts)], loads


def _cost(lengths: np.ndarray, ids: np.ndarray, plan: Plan) -> int:
    width = batching.width_for(int(lengths[ids].max()), plan)
    return batching.rows_of(len(ids), width, plan) * width + plan.start_tokens
