"""Free a layer's weights and leave its outline where it was.

Model code reads plain attributes of its layers (`use_sliding`, `is_linear`, `layer_type`), so a
layer that no longer runs is replaced by a skeleton: same class, same plain attributes and
sub-modules, no arrays. It replaces the layer by identity, in whatever list or module holds it,
because `model.layers` may be a property that returns a copy.
"""

from typing import Any

import mlx.core as mx
from mlx import nn


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of a module tree without its arrays; the classes are kept, `__init__` is not run."""
    bare = type(module).__new__(type(module))
    bare.__dict__.update(module.__dict__)
    bare._no_grad = set(module._no_grad)
    for key, value in module.items():
        if not isinstance(value, mx.array):
            dict.__setitem__(bare, key, _without_arrays(value))
    return bare


def _without_arrays(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return skeleton(value)
    if isinstance(value, dict):
        return {k: _without_arrays(v) for k, v in value.items() if not isinstance(v, mx.array)}
    if type(value) in (list, tuple):
        return type(value)(_without_arrays(v) for v in value if not isinstance(v, mx.array))
    return value


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> int:
    """Put `new` wherever `old` itself (not an equal one) is held below `root`.

    Returns the number of places.
    """
    places = 0
    for key, value in _entries(root):
        if value is old:
            root[key] = new
            places += 1
        elif isinstance(value, dict | list):
            places += replace_module(value, old, new)
    return places


def _entries(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))
