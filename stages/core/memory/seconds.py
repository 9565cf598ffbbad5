"""Seconds of the layers: attention, timed alone, and all else, which no block changes.

With B rows of T tokens, attention in blocks of q queries takes

    c · ceil(T / q) + a·B·T + b·B·T·S

S keys a query: T, or about (T + q) / 2 under a causal mask, where a block sees no keys behind its
last query. Attention in one piece is one block that sees all keys (MLX hides the later ones, but
computes their scores). All else is c + a·B·T, fitted on what is left of the layers' points without
attention, over those in blocks and those in one piece: so attention alone decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.core.memory.curves import Curve, Number, Shape, all_keys, curve, fit, shape_of
from stages.core.memory.points import Reading, Rest

AGAIN = 1 / 3
"""The forward pass, once more under recomputation, beside forward and backward."""


class AttentionSeconds:
    """Of one layer's attention, forward and backward.

    Args:
        readings: Of kind `attention`, in blocks or not, all alike.
        causal: A block sees no keys behind its last query.
    """

    def __init__(self, readings: Sequence[Reading], causal: bool) -> None:
        self.causal = causal
        features = [
            [float(x) for x in self._features(shape_of(r.point), r.point.way.attention_block)]
            for r in readings
        ]
        self._costs = np.array(fit([x.seconds for x in readings], np.array(features)))

    def at(self, shape: Shape, block: int) -> Number:
        """Seconds for a shape; block 0: in one piece."""
        return sum(c * x for c, x in zip(self._costs, self._features(shape, block), strict=True))

    def _features(self, shape: Shape, block: int) -> tuple[Number, Number, Number]:
        tokens = shape.rows * shape.width
        if not block:
            return 1.0 + 0 * tokens, tokens, tokens * shape.width
        size = np.minimum(block, shape.width)
        full, left = shape.width // size, shape.width % size
        seen = size * size * full * (full + 1) / 2 + left * shape.width
        scores = shape.rows * (seen if self.causal else shape.width**2)
        return np.ceil(shape.width / size), tokens, scores


class Seconds:
    """Of all trained layers, forward and backward, with what a step costs at its start.

    Args:
        alike: Readings of kind `layers` that differ in attention's blocks alone.
        own: Those of them that are in blocks, or those that are not.
        attention: Readings of kind `attention`.
        rest: What the model is made of.
    """

    def __init__(
        self,
        alike: Sequence[Reading],
        own: Sequence[Reading],
        attention: Sequence[Reading],
        rest: Rest,
    ) -> None:
        self._attention: dict[bool, AttentionSeconds] = {}
        for blocks in (False, True):
            found = [x for x in attention if (x.point.way.attention_block > 0) == blocks]
            if found and any(x.seconds for x in found):
                self._attention[blocks] = AttentionSeconds(found, rest.causal)
        recompute = own[0].point.way.recompute
        self._calls = rest.attention * (rest.layers - rest.cut) / rest.layers
        self._calls *= 1 + AGAIN * (recompute == 1)
        used = [x for x in alike if (x.point.way.attention_block > 0) in self._attention]
        self._apart = (own[0].point.way.attention_block > 0) in self._attention
        if self._apart:
            self._others = curve(used, self._left, all_keys, by_keys=False)
        else:
            self._others: Curve = curve(own, lambda x: x.seconds, all_keys)

    def at(self, shape: Shape, block: int) -> Number:
        """Seconds for a shape."""
        others = self._others.at(shape, block)
        if not self._apart:
            return others
        return others + self._calls * self._attention[block > 0].at(shape, block)

    def _left(self, reading: Reading) -> float:
        """A reading's seconds without those of attention."""
        shape, block = shape_of(reading.point), reading.point.way.attention_block
        attention = self._calls * float(self._attention[block > 0].at(shape, block))
        return max(0.0, reading.seconds - attention)
