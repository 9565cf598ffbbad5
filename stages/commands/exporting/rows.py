"""The few rows that an export is checked on, and what a model says about them.

Everything is computed with float32 activations, whatever type the weights have, so that what is
compared are the weights: rounding of bfloat16 activations would hide what a fuse loses.

Shapes: T tokens of a row, N targets of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from stages.core import tables
from stages.core.errors import UserError
from stages.core.update.loss import cross_entropy

MOST_ROWS = 8
LOGITS_PER_ROW = 32
"""Targets of a row whose logits are compared; the loss takes all of them."""
TOKENS_AFTER_PROMPT = 64
LONG = 256
"""Rows that need more tokens than this are taken only where there are no shorter ones: a check is
to take seconds, also on a CPU."""

Forward = Callable[[np.ndarray], mx.array | np.ndarray]
"""Tokens int32 (T,) → logits (T, V)."""


@dataclass(frozen=True)
class Row:
    """One row, cut after some targets.

    Attributes:
        tokens: int32 (T,).
        targets: int64, indices into `tokens`, none of them 0.
    """

    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Seen:
    """What a model says about the rows.

    Attributes:
        logits: float32 (N, V), at up to `LOGITS_PER_ROW` targets of each row.
        losses: float64, of every target, in nats.
    """

    logits: np.ndarray
    losses: np.ndarray

    @property
    def loss(self) -> float:
        """Per target."""
        return float(self.losses.mean())


def choose(folder: Path = Path("data/examples")) -> tuple[str, list[Row]]:
    """A few rows of the test split, of valid or train where test has no target.

    Returns:
        The split, and at most `MOST_ROWS` rows, spread over those that need few tokens.

    Raises:
        UserError: A table is missing, or no split has a target.
    """
    for split in ("test", "valid", "train"):
        rows = _rows(tables.read_examples(folder / f"{split}.parquet"))
        if rows:
            return split, rows
    raise UserError(
        "There is no row to check an export on",
        where=str(folder),
        found="0 targets in test, valid and train",
        expected="at least one row with an answer",
        fix="run `dvc repro`",
    )


def observe(forward: Forward, rows: Sequence[Row]) -> Seen:
    """Run a model over the rows, one at a time."""
    logits, losses = [], []
    for row in rows:
        logits_NV = mx.array(forward(row.tokens))[mx.array(row.targets - 1)].astype(mx.float32)
        losses.append(np.array(cross_entropy(logits_NV, mx.array(row.tokens[row.targets]))))
        some = np.linspace(0, len(row.targets) - 1, min(len(row.targets), LOGITS_PER_ROW))
        logits.append(np.array(logits_NV[mx.array(some.astype(np.int64))]))
    return Seen(np.concatenate(logits), np.concatenate(losses).astype(np.float64))


def forward(model: nn.Module) -> Forward:
    """A model without dropout and with float32 activations, from its embedding on.

    On a CPU quantized weights are unpacked first: the same numbers, and products of packed ones
    take minutes there. The model is changed for good: save nothing of it afterwards.
    """
    model.eval()
    if mx.default_device() == mx.cpu:
        model = _unpacked(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            wide = [
                (name, array.astype(mx.float32))
                for name, array in tree_flatten(module.parameters())
                if mx.issubdtype(array.dtype, mx.floating)
            ]
            module.load_weights(wide, strict=False)
    return lambda tokens: model(mx.array(tokens)[None])[0]


def _unpacked(model: nn.Module) -> nn.Module:
    """The model with float32 weights in place of quantized ones, those that mlx-lm can unpack."""
    for module in model.modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding | QuantizedSwitchLinear):
            for name in ("scales", "biases"):
                array = module.get(name)
                if array is not None and mx.issubdtype(array.dtype, mx.floating):
                    module[name] = array.astype(mx.float32)
    return utils.dequantize_model(model)


def _rows(examples: tables.Examples) -> list[Row]:
    found = []
    for index in np.flatnonzero(examples.targets > 0):
        tokens, mask = examples.example(int(index))
        targets = np.flatnonzero(mask[1:]) + 1
        end = min(len(tokens), int(targets[0]) + TOKENS_AFTER_PROMPT)
        found.append(Row(tokens[:end], targets[targets < end]))
    found.sort(key=lambda row: len(row.tokens))
    short = [row for row in found if len(row.tokens) <= LONG]
    found = short if len(short) >= MOST_ROWS else found[:MOST_ROWS]
    if len(found) <= MOST_ROWS:
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, MOST_ROWS).astype(int)]
