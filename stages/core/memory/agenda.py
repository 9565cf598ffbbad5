"""Which points are measured for a run: small ones whose phases bind as they do in large steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from stages.core.config.settings import Settings
from stages.core.memory.fit import FEW_TARGETS
from stages.core.memory.points import Point, Way
from stages.core.model.manifest import Manifest

CHUNKS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"cpu": (32, 64, 128), "cuda": (128, 512), "metal": (64, 256)}
)
"""Pieces of the loss that are tried, by device."""
BLOCKS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"cpu": (64, 128, 256), "cuda": (256, 512), "metal": (128, 256, 512)}
)
"""Query blocks that are tried."""
WIDTHS: Mapping[str, int] = MappingProxyType({"cpu": 64, "cuda": 512, "metal": 256})
"""Largest width of the smallest point."""
ATTENTION_WIDTHS: Mapping[str, int] = MappingProxyType({"cpu": 1024, "cuda": 4096, "metal": 2048})
"""Longest attention that is measured alone."""
WIDEST: Mapping[str, int] = MappingProxyType({"cpu": 8, "cuda": 4, "metal": 4})
"""The longest point of attention in one piece, in widths of the smallest: there attention binds, or
nearly so, in a model of 100 million parameters."""
RECURRENT_WIDTH = 16
"""The same for layers that step through time in Python."""
RECURRENT_KEYS = ("linear_attn", "mamba", "mixer", "recurrent", "ssm")
SHORT = 128
"""Examples up to this long gain nothing from attention in blocks."""
STRETCH = 32
"""The longest example is at most so many times longer than the smallest point, for any length."""
SHORTER = 8
"""The longest attention measured alone is so many times longer than the shortest."""
CHECK_WIDTH = 48
ONE_PIECE = 256
"""Targets of a loss in one piece."""
PIECES, MORE_PIECES = 4, 8
"""Pieces of the loss that keep MLX's queue full, and many more: what each leaves behind."""
SMALL_CHUNK = 16


def frozen_layers(settings: Settings, manifest: Manifest) -> bool:
    """Whether some layers stay as they are, as far as the settings tell."""
    train = settings.train
    keys = train.lora_parameters.keys or ()
    outer = train.fine_tune_type != "full" and any(key in manifest.outer_keys for key in keys)
    return 0 < train.num_layers < manifest.num_layers and not outer


def recurrent(manifest: Manifest) -> bool:
    """Whether some layers step through time, by the names of their modules."""
    return any(part in key for key in manifest.layer_keys for part in RECURRENT_KEYS)


def chunks(memory: Any, kind: str) -> tuple[int, ...]:
    """Pieces of the loss to try; 0: one piece."""
    if memory.loss_chunk == "auto":
        return CHUNKS[kind]
    return (0,) if memory.loss_chunk == "off" else (int(memory.loss_chunk),)


def blocks(memory: Any, kind: str, longest: int) -> tuple[int, ...]:
    """Query blocks to try; 0: off."""
    if memory.attention_block == "auto":
        tried = BLOCKS[kind] if longest > SHORT else ()
        return (0, *(block for block in tried if block < longest))
    return (0,) if memory.attention_block == "off" else (int(memory.attention_block),)


def first(
    settings: Settings, manifest: Manifest, longest: int, kind: str, whole_table: bool = False
) -> list[Point]:
    """What is measured in any case, points of the whole model first.

    Args:
        longest: Tokens of the longest example.
        kind: `cpu`, `cuda` or `metal`.
        whole_table: Also what is only compared with.
    """
    width = min(CHECK_WIDTH, longest)
    way = Way(recompute=1, attention_block=SMALL_CHUNK)
    points = [Point("check", 1, width, max(1, width // 2), SMALL_CHUNK, way)]
    if frozen_layers(settings, manifest):
        shapes = point_shapes(manifest, longest, kind)
        points += [Point("frozen", rows, width) for rows, width in shapes[1:]]
    return [*points, Point("update"), *parts(settings, longest, kind, whole_table)]


def parts(settings: Settings, longest: int, kind: str, whole_table: bool = True) -> list[Point]:
    """Attention and the loss alone."""
    pieces = chunks(settings.memory, kind)
    if kind == "cpu" and len(pieces) > 1:
        # There memory is in proportion to the piece, and time does not hang on it.
        pieces = pieces[:1]
    pieces = (*pieces, 0) if whole_table and 0 not in pieces else pieces
    return attentions(settings, longest, kind) + heads(pieces)


def heads(pieces: Sequence[int]) -> list[Point]:
    """The loss alone: enough pieces to fill the queue, and many of the smallest one."""
    points = []
    for chunk in pieces:
        points.append(Point("head", targets=PIECES * chunk or ONE_PIECE, loss_chunk=chunk))
    smallest = min((chunk for chunk in pieces if chunk), default=0)
    if smallest:
        points.append(Point("head", targets=MORE_PIECES * smallest, loss_chunk=smallest))
    return points


def attentions(settings: Settings, longest: int, kind: str) -> list[Point]:
    """Attention alone: whole at two lengths, in blocks of two sizes at the larger one.

    A short one of each tells for time what a call or block costs beside its scores.
    """
    large = min(longest, ATTENTION_WIDTHS[kind])
    points = [Point("attention", 1, width) for width in sorted({max(2, large // 2), large})]
    inside = [block for block in blocks(settings.memory, kind, longest) if 0 < block < large]
    for block in sorted({inside[0], inside[-1]} if inside else ()):
        points.append(Point("attention", 1, large, way=Way(attention_block=block)))
    short = large // SHORTER
    if inside and inside[0] < short:
        points.append(Point("attention", 1, short))
        points.append(Point("attention", 1, short, way=Way(attention_block=inside[0])))
    return points


def layers(manifest: Manifest, longest: int, kind: str, way: Way) -> list[Point]:
    """Points from which the layers' cost is fitted, for one way.

    For attention in blocks the block differs from point to point, since one fit serves all sizes:
    small ones, where all else binds, and one so large that attention does.
    """
    shapes = point_shapes(manifest, longest, kind)
    if not way.attention_block:
        widest = WIDEST[kind] * shapes[0][1]
        shapes[-1] = (1, shapes[-1][1] if recurrent(manifest) else min(longest, widest))
        return [_layers(rows, width, way) for rows, width in shapes]
    large = shapes[-1][1]
    picked = [(large // 2, large // 16), (large, large // 16), (large, large - 1)]
    return [
        _layers(1, width, replace(way, attention_block=max(1, block))) for width, block in picked
    ]


def point_shapes(manifest: Manifest, longest: int, kind: str) -> list[tuple[int, int]]:
    """(rows, width) of the points, smallest first: in both rows and length."""
    most = RECURRENT_WIDTH if recurrent(manifest) else WIDTHS[kind]
    width = max(2, min(max(most, longest // STRETCH), longest // 4))
    return [(1, width), (2, width), (1, 2 * width), (1, 4 * width)]


def _layers(rows: int, width: int, way: Way) -> Point:
    targets = min(FEW_TARGETS, rows * (width - 1))
    return Point("layers", rows, width, targets, SMALL_CHUNK, way)
