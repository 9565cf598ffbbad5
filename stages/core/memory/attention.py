"""Attention in query blocks, each recomputed in the backward pass: exact, linear memory in length.

MLX's attention keeps scores of B x H x T x T for the backward pass wherever that isn't fused
(Metal and the CPU). Here each block of queries makes its own scores, twice, and never keeps them.
Blocks wait for each other (`mx.depends`), forward and backward: without that MLX schedules many
at once (one layer, 9 heads, T=2048, block 64 on the CPU: 73 MB chained, 184 not, 502 whole).
`blocked` replaces base's `scaled_dot_product_attention` in every mlx_lm.models module that holds
it. A fused backward pass in MLX makes `attention_in_blocks` superfluous.

Shapes: B rows, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from stages.core.layers import exponentials
from stages.core.layers.replaced import replaced

NAME = "scaled_dot_product_attention"


class Call(NamedTuple):
    """What one call of attention looks like, without rows and lengths."""

    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: mx.Dtype
    masked: str
    """`causal`, `array` or `none`."""


@dataclass
class Calls:
    """How often attention was computed in blocks, and how often whole because it was short."""

    blocked: int = 0
    whole: int = 0
    kinds: set[Call] = field(default_factory=set)

    def saw(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> None:
        """Remember what a call looks like."""
        masked = mask if isinstance(mask, str) else "none" if mask is None else "array"
        shapes = queries.shape[-3], keys.shape[-3], queries.shape[-1], values.shape[-1]
        self.kinds.add(Call(*shapes, queries.dtype, masked))


@contextmanager
def blocked(block: int) -> Iterator[Calls]:
    """Compute attention in blocks of `block` queries inside the context; 0: leave it alone.

    Put it around the whole `value_and_grad`: layers may be recomputed in the backward pass. A
    model that calls mx.fast directly is missed: then `Calls` stays at zero.
    """
    calls = Calls()
    if not block:
        yield calls
        return
    from mlx_lm.models import base

    original = getattr(base, NAME)
    with replaced(NAME, original, _replacement(original, block, calls)):
        yield calls


def _replacement(original: Callable, block: int, calls: Calls) -> Callable:
    def scaled_dot_product_attention(  # noqa: PLR0917 (base's own signature)
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        calls.saw(queries, keys, values, mask)
        if queries.shape[-2] <= block or hasattr(cache, "bits"):
            calls.whole += 1
            return original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        calls.blocked += 1
        return attention_in_blocks(
            queries, keys, values, scale=scale, mask=mask, block=block, sinks=sinks
        )

    return scaled_dot_product_attention


def attention_in_blocks(
    queries_BHLD: mx.array,
    keys_BHSD: mx.array,
    values_BHSD: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    block: int,
    sinks: mx.array | None = None,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`, one block of queries after the other.

    mask: "causal", None, or an array (bool or additive) that broadcasts to (B, H, L, S); gradients
        reach an additive one. Keys and values may have fewer heads. With "causal" a block sees no
        keys behind its last query.
    """
    words = {"scale": scale, "mask": None if isinstance(mask, mx.array) else mask}
    arrays = {"queries": queries_BHLD, "keys": keys_BHSD, "values": values_BHSD}
    arrays |= {k: x for k, x in (("mask", mask), ("sinks", sinks)) if isinstance(x, mx.array)}
    names = list(arrays)
    spans = [
        (start, min(start + block, queries_BHLD.shape[-2]))
        for start in range(0, queries_BHLD.shape[-2], block)
    ]

    @mx.custom_function
    def attention(*given: mx.array) -> mx.array:
        return _forward(dict(zip(names, given, strict=True)), words, spans)

    @attention.vjp
    def gradients(given: Any, cotangent: mx.array, _output: mx.array) -> tuple[mx.array, ...]:
        found = _backward(dict(zip(names, given, strict=True)), words, spans, cotangent)
        return tuple(found[name] for name in names)

    return attention(*arrays.values())


def _forward(arrays: dict[str, mx.array], words: dict[str, Any], spans: list) -> mx.array:
    pieces: list[mx.array] = []
    for span in spans:
        cut = _cut(arrays, words, span)
        if pieces:
            (cut["queries"],) = mx.depends([cut["queries"]], [pieces[-1]])
        pieces.append(_whole(cut, words))
    return mx.concatenate(pieces, axis=-2)


def _backward(
    arrays: dict[str, mx.array], words: dict[str, Any], spans: list, cotangent: mx.array
) -> dict[str, mx.array]:
    """Gradient of each input: rows of queries (and of a mask) joined, all others summed up.

    Sums are float32; booleans get zeros, which nothing uses.
    """
    by_rows = [name for name, x in arrays.items() if _has_rows(name, x)]
    joined: dict[str, list[mx.array]] = {name: [] for name in by_rows}
    summed = {k: mx.zeros(x.shape, mx.float32) for k, x in arrays.items() if k not in by_rows}
    for span in spans:
        cut = _cut(arrays, words, span)
        before = [*summed.values(), *(pieces[-1] for pieces in joined.values() if pieces)]
        (cut["queries"],) = mx.depends([cut["queries"]], before)
        for name, piece in _piece_gradients(cut, words, cotangent[..., slice(*span), :]).items():
            if name in joined:
                joined[name].append(piece)
            else:
                summed[name] = _add(summed[name], piece)
    found = {name: mx.concatenate(pieces, axis=-2) for name, pieces in joined.items()}
    return found | {name: x.astype(arrays[name].dtype) for name, x in summed.items()}


def _piece_gradients(
    cut: dict[str, mx.array], words: dict[str, Any], cotangent: mx.array
) -> dict[str, mx.array]:
    moving = [name for name, x in cut.items() if mx.issubdtype(x.dtype, mx.floating)]
    still = {name: x for name, x in cut.items() if name not in moving}

    def piece(*given: mx.array) -> mx.array:
        return _whole({**still, **dict(zip(moving, given, strict=True))}, words)

    _, found = mx.vjp(piece, [cut[name] for name in moving], [cotangent])
    zeros = {name: mx.zeros(x.shape, x.dtype) for name, x in still.items()}
    return zeros | dict(zip(moving, found, strict=True))


def _whole(arrays: dict[str, mx.array], words: dict[str, Any]) -> mx.array:
    given = {**words, **arrays}
    queries, keys, values, mask = (given[x] for x in ("queries", "keys", "values", "mask"))
    scale = given["scale"]
    if exponentials.serves(arrays, mask):
        return exponentials.attention(queries, keys, values, scale=scale, mask=mask)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=given.get("sinks")
    )


def _cut(
    arrays: dict[str, mx.array], words: dict[str, Any], span: tuple[int, int]
) -> dict[str, mx.array]:
    """What one block of queries needs; with a causal mask, keys up to its last query."""
    keys = arrays["keys"].shape[-2]
    seen = keys - arrays["queries"].shape[-2] + span[1] if words["mask"] == "causal" else keys
    cut = dict(arrays)
    for name, x in arrays.items():
        if name in ("keys", "values"):
            cut[name] = x[..., :seen, :]
        elif _has_rows(name, x):
            cut[name] = x[..., slice(*span), :]
    return cut


def _has_rows(name: str, x: mx.array) -> bool:
    return name == "queries" or (name == "mask" and x.ndim > 1 and x.shape[-2] > 1)


def _add(total: mx.array, piece: mx.array) -> mx.array:
    """`total` with `piece` added; a piece may be shorter on the keys' axis."""
    piece = piece.astype(mx.float32)
    if piece.shape == total.shape:
        return total + piece
    return total.at[..., : piece.shape[-2], :].add(piece)
