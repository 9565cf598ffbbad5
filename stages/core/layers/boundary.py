"""What passes between the layers below a cut and those above it, as named arrays.

Usually that is the hidden states alone. Where upper layers use other outputs of lower ones (keys
and values shared between layers, the first layer's values), those join under names such as
`layer4.0.1`: layer 4's first output beside the hidden states, its second array. Flat and named,
a boundary can be written to disk and can be an input of `mx.compile`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from stages.core.layers.stubs import UnsupportedModel

Boundary = dict[str, mx.array]

HIDDEN = "hidden"


class ArrayName(str):
    """Stands in a template for the array of this name."""


@dataclass(frozen=True)
class CutPlan:
    """How the boundary below one cut is made up."""

    cut: int
    extras: dict[int, tuple]
    """Layer -> its outputs beside the hidden states, each array replaced by its ArrayName."""
    axes: dict[str, tuple[int, int]]
    """Name -> (batch axis, time axis), negative."""


def pack(outputs: dict[int, tuple], cut: int, extras: Iterable[int]) -> Boundary:
    """The boundary from the outputs of layer cut-1 and of the layers in `extras`."""
    boundary = {HIDDEN: mx.stop_gradient(outputs[cut - 1][0])}
    for index in extras:
        for path, leaf in tree_flatten(outputs[index][1:]):
            if isinstance(leaf, mx.array):
                boundary[f"layer{index}.{path}"] = mx.stop_gradient(leaf)
    return boundary


def unpack(boundary: Boundary, plan: CutPlan) -> dict[int, tuple]:
    """Stub -> (hidden states or None, other outputs or None).

    stop_gradient also makes new handles: model code may change the arrays it is given.
    """

    def filled(leaf: Any) -> Any:
        return mx.stop_gradient(boundary[leaf]) if isinstance(leaf, ArrayName) else leaf

    given = {index: (None, tree_map(filled, tree)) for index, tree in plan.extras.items()}
    others = given.get(plan.cut - 1, (None, None))[1]
    return given | {plan.cut - 1: (mx.stop_gradient(boundary[HIDDEN]), others)}


def plan_cut(
    cut: int,
    extras: Iterable[int],
    traces: list[dict[int, tuple]],
    shapes: tuple[tuple[int, int], ...],
) -> CutPlan:
    """The plan from two traces of the lower layers on tokens of two (rows, tokens) shapes.

    Raises UnsupportedModel where a layer shares something that isn't one array per row and token.
    """
    templates = [{i: _template(trace[i][1:], i) for i in extras} for trace in traces]
    if templates[0] != templates[1]:
        raise UnsupportedModel(f"below layer {cut}, what layers share depends on the shape")
    small, large = (pack(trace, cut, extras) for trace in traces)
    axes = {name: _axes(name, small[name].shape, large[name].shape, shapes) for name in small}
    return CutPlan(cut, templates[0], axes)


def _template(others: tuple, index: int) -> tuple:
    def named(path: str, leaf: Any) -> Any:
        return ArrayName(f"layer{index}.{path}") if isinstance(leaf, mx.array) else leaf

    return tree_map_with_path(named, others)


def _axes(
    name: str, small: tuple, large: tuple, shapes: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """The axes whose lengths went from one batch shape's to the other's."""
    changes = [(a, b) for a, b in zip(small, large, strict=True)]
    found = [
        [i - len(changes) for i, change in enumerate(changes) if change == wanted]
        for wanted in zip(*shapes, strict=True)
    ]
    if [len(axes) for axes in found] != [1, 1]:
        raise UnsupportedModel(f"{name} has no batch and time axis: shapes {small} and {large}")
    return found[0][0], found[1][0]
