"""The noise of dropout: drawn anew for each micro-batch, and the same again after a resume.

MLX's random state cannot be stored and put back, so it is seeded from numbers that a resumed run
knows: the run's seed, the update, the micro-batch.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def seed(*numbers: int) -> None:
    """Seed MLX's random numbers from whole numbers, each at least 0; their order counts."""
    mx.random.seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
