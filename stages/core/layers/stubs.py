"""Stubs in place: the layers of a model run, or pass their input on, as the current pass says.

Each layer object gets a subclass of its own class, so its parameters, their names and its place
in the model stay what they are; closing puts the classes back. `stages.core.layers.staged` builds
on this and is what other modules import.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map

from stages.core.layers.skeleton import replace_module

Runner = Callable[[nn.Module, Callable, tuple, dict], Any]
"""How a layer is run: called with (layer, its own class's `__call__`, args, kwargs)."""


class UnsupportedModel(Exception):
    """This architecture can't be taken apart in the wanted way; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MissingOutput(UnsupportedModel):
    """Outputs that stubs don't have were used; `layers` says whose."""

    def __init__(self, layers: set[int]) -> None:
        super().__init__(f"it uses more than the hidden states of layers {sorted(layers)}")
        self.layers = layers


class Missing:
    """Stands for an output beside the hidden states of a stub; raises on any use."""

    def __init__(self, layer: int) -> None:
        object.__setattr__(self, "_layer", layer)

    def _used(self, *_args: Any, **_kwargs: Any) -> Any:
        raise MissingOutput({object.__getattribute__(self, "_layer")})

    __getattr__ = __setattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = _used
    __call__ = __contains__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _used
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __int__ = __float__ = _used
    __index__ = __hash__ = _used


@dataclass
class Pass:
    """One run of the model: which layers run, what stubs return, what is kept."""

    run: range
    given: dict[int, tuple[mx.array | None, tuple | None]] = field(default_factory=dict)
    """Stub -> (hidden states, or None: its input; its other outputs, or None: Missing)."""
    keep: frozenset[int] = frozenset()
    kept: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)


class StubbedLayers:
    """The layers of one model, each able to be a stub. Without a pass they run as ever."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        self.model = model
        self.layers = layers
        self.runners: dict[int, Runner] = {}
        self.widths: tuple[int | None, ...] = (None,) * len(layers)
        """Per layer: None where it returns an array, else the length of the tuple."""
        self.freed = 0
        self._classes = [type(layer) for layer in layers]
        self._pass: Pass | None = None
        for index, layer in enumerate(layers):
            layer.__class__ = _staged_class(self, index, type(layer))

    def close(self) -> None:
        """Put the classes back. Freed layers keep theirs, and so raise when called."""
        for index, layer in enumerate(self.layers):
            if index >= self.freed:
                layer.__class__ = self._classes[index]
        # The staged classes are reference cycles, freed late: hold no weights through them.
        self.layers = []

    def forward(self, tokens_BT: mx.array, new: Pass) -> mx.array:
        """Logits of the model's own `__call__` under this pass; fills `new.kept`, `new.order`."""
        self._pass = new
        try:
            return self.model(tokens_BT)
        finally:
            self._pass = None

    def replace(self, index: int, new: nn.Module) -> None:
        """Put another module in a layer's place, in whatever list of the model holds it."""
        replace_module(self.model, self.layers[index], new)
        self.layers[index] = new

    def call(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> Any:
        """What the layer's `__call__` does: run, or stand in, as the current pass says."""
        current = self._pass
        runs = current is None or index in current.run
        if runs and index < self.freed:
            raise RuntimeError(f"layer {index} was freed: only the layers above it can run")
        if current is None:
            return self._classes[index].__call__(layer, *args, **kwargs)
        current.order.append(index)
        passed_on = args[0] if args else next(iter(kwargs.values()))
        output = (
            self._run(index, layer, args, kwargs) if runs else self._stub(index, current, passed_on)
        )
        if index in current.keep:
            current.kept[index] = fresh(output)
        return output

    def _run(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> Any:
        original = self._classes[index].__call__
        try:
            if index in self.runners:
                return self.runners[index](layer, original, args, kwargs)
            return original(layer, *args, **kwargs)
        except (TypeError, ValueError) as error:
            # mlx refuses a Missing without touching it: the culprit is among the inputs.
            missing = _missing_layers((args, kwargs))
            if missing:
                raise MissingOutput(missing) from error
            raise

    def _stub(self, index: int, current: Pass, passed_on: mx.array) -> Any:
        hidden, others = current.given.get(index, (None, None))
        hidden = passed_on if hidden is None else hidden
        width = self.widths[index]
        if width is None:
            return hidden
        return (hidden, *([Missing(index)] * (width - 1) if others is None else others))


def fresh(tree: Any) -> Any:
    """The same values under new array handles.

    Model code such as `h *= scale` changes the array object it is given; what is stored must be
    another object.
    """
    return tree_map(lambda x: x.reshape(x.shape) if isinstance(x, mx.array) else x, tree)


def _missing_layers(tree: Any) -> set[int]:
    if type(tree) is Missing:
        return {object.__getattribute__(tree, "_layer")}
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        return set().union(*(_missing_layers(x) for x in tree))
    return set()


def _staged_class(stubs: StubbedLayers, index: int, original: type) -> type:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stubs.call(index, self, args, kwargs)

    members = {"__call__": __call__, "__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (original,), members)
