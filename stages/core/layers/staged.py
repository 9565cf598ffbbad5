"""The one way into the layers of any mlx-lm model: stubs in place, never slices.

Loss at targets, activation cache, recomputation and attention blocks all need to run a part of
a model: the layers below a cut, the layers above it, the head alone. Slicing `model.layers` gives
wrong numbers without an error for many architectures (masks, layer tables, embedding scales and
cache lists are indexed by layer). So every layer keeps its place and either runs or is a stub
(stages.core.layers.stubs). All the rest (embeddings, per-layer inputs, masks, rotary positions,
final norm, head, soft caps) stays the model's own code, and parameter names do not change.

    with StagedModel(model) as staged:          # adapters attached, parameters frozen before
        boundary = staged.frozen(tokens_BT, cut)
        hidden_BTD = staged.top(tokens_BT, boundary, cut)
        logits_CV = staged.head(hidden_CD)

Shapes: B rows, T tokens, D hidden size, C chosen positions, V vocabulary. A few models keep more
than one stream, (S, B, T, D): everything here counts axes from the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from stages.core.layers.boundary import Boundary, CutPlan, pack, plan_cut, unpack
from stages.core.layers.skeleton import skeleton
from stages.core.layers.stubs import MissingOutput, Pass, Runner, StubbedLayers, UnsupportedModel

NO_PARAMETERS: Mapping[str, mx.array] = MappingProxyType({})

PROBE_SHAPES = ((2, 5), (3, 7))
"""Two (rows, tokens): the axis in which two traces differ is the batch or the time axis."""


@dataclass(frozen=True)
class LayerFacts:
    """What one run of a model shows about its layers."""

    count: int
    """Number of layers; each is called exactly once, in order."""
    outputs: tuple[int | None, ...]
    """Per layer: None where it returns an array, else the length of the tuple it returns."""


def layer_list(model: nn.Module) -> list[nn.Module]:
    """The model's layers in order; raises UnsupportedModel where there are none."""
    layers = getattr(model, "layers", None)
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise UnsupportedModel("it has no list of layers")
    return list(layers)


def probe(model: nn.Module, tokens_BT: mx.array | None = None) -> LayerFacts:
    """How the layers of a model are called, from one run that is traced but not computed.

    Raises UnsupportedModel where the layers are not called exactly once each, in order.
    """
    with StagedModel(model, tokens_BT) as staged:
        return staged.facts


class StagedModel:
    """A loaded model of which parts can be run; the model itself stays usable as before.

    Wrap it after adapters are attached and parameters frozen or unfrozen. `close()`, or leaving
    the context, puts the layers' classes back. Works inside `mx.compile` and
    `nn.value_and_grad(model, ...)`; nothing traced is kept between calls.
    """

    def __init__(self, model: nn.Module, tokens_BT: mx.array | None = None) -> None:
        self.model = model
        self._stubs = StubbedLayers(model, layer_list(model))
        self._plans: dict[int, CutPlan] = {}
        try:
            tokens_BT = _probe_tokens(PROBE_SHAPES[0]) if tokens_BT is None else tokens_BT
            self.facts = self._watch(tokens_BT)
            self._stubs.widths = self.facts.outputs
            self._head_names = self._names_in_head(tokens_BT)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "StagedModel":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the layers' own classes back. Freed layers stay freed and raise when called."""
        self._stubs.close()

    def run_layer_with(self, index: int, runner: Runner | None) -> None:
        """Run this layer through `runner` in every staged mode, or directly again (None).

        Recomputation belongs here: a runner is called where the layer really runs, never for a
        stub, and the `__call__` that it gets asks no mode, so it can be run again at any time.
        """
        if runner is None:
            self._stubs.runners.pop(index, None)
        else:
            self._stubs.runners[index] = runner

    def hidden(self, tokens_BT: mx.array) -> mx.array:
        """Output of the last layer, before the final norm, (B, T, D), of the whole model."""
        return self.top(tokens_BT, {}, 0)

    def frozen(self, tokens_BT: mx.array, cut: int) -> Boundary:
        """Run the layers below `cut` (1 to the number of layers): what the layers above need.

        `hidden` is the output of layer cut-1 in the dtype that the layer gives; other names are
        outputs that upper layers share (keys and values of gemma4 and hunyuan, v_first of rwkv7).
        No gradient passes. Raises UnsupportedModel where the model can't be cut there.
        """
        extras = self._plan(cut).extras
        return pack(self._below(tokens_BT, cut, extras), cut, extras)

    def top(self, tokens_BT: mx.array, boundary: Boundary, cut: int) -> mx.array:
        """Output of the last layer, (B, T, D), from the boundary below `cut`.

        The layers below `cut` are stubs and need no weights. `cut` 0 is the whole model.
        """
        return self._above(tokens_BT, boundary, cut)[0]

    def logits(self, tokens_BT: mx.array, boundary: Boundary, cut: int) -> mx.array:
        """The model's own logits, (B, T, V), from the boundary below `cut`; for checks."""
        return self._above(tokens_BT, boundary, cut)[1]

    def head(
        self, hidden_CD: mx.array, parameters: Mapping[str, mx.array] = NO_PARAMETERS
    ) -> mx.array:
        """Logits (C, V) of hidden states at C positions, by the model's own final norm and head.

        hidden_CD: (..., C, D), the last layer's output gathered before the final norm.
        parameters: values to use in place of the model's own (see `head_parameters`), so that a
            gradient reaches them.
        """
        given = {self.facts.count - 1: (mx.expand_dims(hidden_CD, -3), None)}
        tokens_1C = mx.zeros((1, hidden_CD.shape[-2]), mx.int32)
        with swapped_parameters(self.model, parameters):
            return self._stubs.forward(tokens_1C, Pass(range(0), given))[0]

    def head_parameters(self) -> dict[str, mx.array]:
        """Trained parameters that the head uses (final norm, head, tied embedding), by name.

        Empty in usual LoRA. Ask inside a differentiated function, to get its tracers.
        """
        if not self._head_names:
            return {}
        trained = dict(tree_flatten(self.model.trainable_parameters()))
        return {name: trained[name] for name in self._head_names}

    def boundary_axes(self, cut: int) -> dict[str, tuple[int, int]]:
        """For each name in the boundary below `cut`: (batch axis, time axis), from the end."""
        return dict(self._plan(cut).axes)

    def first_trained(self) -> int:
        """Number of layers that no trained parameter touches: the highest exact cut.

        0 where a trained parameter outside the layers (an embedding) feeds the lowest one.
        """
        trained = [bool(tree_flatten(x.trainable_parameters())) for x in self._stubs.layers]
        cut = trained.index(True) if True in trained else len(trained)
        if cut == 0:
            return 0
        tokens_BT = _probe_tokens((1, 2))
        return 0 if self._influencing(lambda: [*self.frozen(tokens_BT, cut).values()]) else cut

    def free_below(self, cut: int) -> None:
        """Free the weights of the layers below `cut`, for good; `top` works at `cut` alone then.

        Raises UnsupportedModel, with everything as before, where the model's code can't do
        without them.
        """
        tokens_BT = _probe_tokens(PROBE_SHAPES[0])
        boundary = self.frozen(tokens_BT, cut)
        old = self._stubs.layers[:cut]
        for index, layer in enumerate(old):
            self._stubs.replace(index, skeleton(layer))
        try:
            self.top(tokens_BT, boundary, cut)
        except Exception as error:
            for index, layer in enumerate(old):
                self._stubs.replace(index, layer)
            raise UnsupportedModel(f"its code reads weights of frozen layers: {error}") from error
        self._stubs.freed = cut

    def _watch(self, tokens_BT: mx.array) -> LayerFacts:
        every = range(len(self._stubs.layers))
        watched = Pass(every, keep=frozenset(every))
        self._stubs.forward(tokens_BT, watched)
        if watched.order != list(every):
            calls = ", ".join(map(str, watched.order[:12])) or "none"
            raise UnsupportedModel(
                f"its {len(every)} layers are not called once each, in order; calls: {calls}"
            )
        outputs = [watched.kept[index] for index in every]
        strange = {type(x).__name__ for x in outputs if type(x) not in (mx.array, tuple)}
        if strange:
            raise UnsupportedModel(f"its layers return {', '.join(sorted(strange))}")
        widths = tuple(len(x) if isinstance(x, tuple) else None for x in outputs)
        return LayerFacts(len(every), widths)

    def _below(self, tokens_BT: mx.array, cut: int, extras: Iterable[int]) -> dict[int, tuple]:
        """Outputs, always as tuples, of layer cut-1 and of the layers in `extras`."""
        lower = Pass(range(cut), keep=frozenset({cut - 1, *extras}))
        self._stubs.forward(tokens_BT, lower)
        return {i: x if isinstance(x, tuple) else (x,) for i, x in lower.kept.items()}

    def _above(
        self, tokens_BT: mx.array, boundary: Boundary, cut: int
    ) -> tuple[mx.array, mx.array]:
        given = unpack(boundary, self._plan(cut)) if cut else {}
        return self._run_above(tokens_BT, given, cut)

    def _run_above(self, tokens_BT: mx.array, given: dict, cut: int) -> tuple[mx.array, mx.array]:
        """(hidden states of the last layer, logits) of the layers from `cut` up."""
        last = self.facts.count - 1
        upper = Pass(range(cut, self.facts.count), given, keep=frozenset({last}))
        logits_BTV = self._stubs.forward(tokens_BT, upper)
        kept = upper.kept[last]
        return kept[0] if isinstance(kept, tuple) else kept, logits_BTV

    def _plan(self, cut: int) -> CutPlan:
        if not 1 <= cut <= self.facts.count:
            raise ValueError(f"cut {cut}: expected 1 to {self.facts.count}")
        if cut not in self._plans:
            self._plans[cut] = self._find_plan(cut)
        return self._plans[cut]

    def _find_plan(self, cut: int) -> CutPlan:
        """Trace the model cut there; what the upper part misses joins, until nothing is missed."""
        extras: set[int] = set()
        while True:
            try:
                traces = [self._trace_cut(cut, extras, shape) for shape in PROBE_SHAPES]
                return plan_cut(cut, sorted(extras), traces, PROBE_SHAPES)
            except MissingOutput as error:
                if error.layers <= extras:
                    raise
                extras |= error.layers
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                raise UnsupportedModel(f"it can't be cut below layer {cut}: {error}") from error

    def _trace_cut(self, cut: int, extras: set[int], shape: tuple[int, int]) -> dict[int, tuple]:
        tokens_BT = _probe_tokens(shape)
        outputs = self._below(tokens_BT, cut, extras)
        given = {index: (None, outputs[index][1:]) for index in extras}
        given[cut - 1] = (outputs[cut - 1][0], given.get(cut - 1, (None, None))[1])
        self._run_above(tokens_BT, given, cut)
        return outputs

    def _names_in_head(self, tokens_BT: mx.array) -> list[str]:
        if not self._outer_trained():
            return []
        hidden_CD = self.hidden(tokens_BT)[..., 0, :, :]
        return self._influencing(lambda: [self.head(hidden_CD)])

    def _outer_trained(self) -> dict[str, mx.array]:
        """Trained parameters outside the layers, by name."""
        inside = {id(layer) for layer in self._stubs.layers}
        prefixes = tuple(f"{n}." for n, m in self.model.named_modules() if id(m) in inside)
        trained = tree_flatten(self.model.trainable_parameters())
        return {name: value for name, value in trained if not name.startswith(prefixes)}

    def _influencing(self, outputs: Callable[[], list[mx.array]]) -> list[str]:
        """Trained parameters outside the layers that change `outputs`: set to NaN, does it show?

        Gradients would not tell: they are 0 for lora_a while lora_b is 0.
        """
        found = []
        for name, value in self._outer_trained().items():
            poison = mx.broadcast_to(mx.array(float("nan"), value.dtype), value.shape)
            with swapped_parameters(self.model, {name: poison}):
                if any(mx.isnan(x).any().item() for x in outputs()):
                    found.append(name)
        return found


@contextmanager
def swapped_parameters(model: nn.Module, parameters: Mapping[str, mx.array]) -> Iterator[None]:
    """Put values, by flat name, in the model; at the end those that were there come back."""
    if not parameters:
        yield
        return
    before = {k: v for k, v in tree_flatten(model.parameters()) if k in parameters}
    model.update(tree_unflatten(list(parameters.items())))
    try:
        yield
    finally:
        model.update(tree_unflatten(list(before.items())))


def _probe_tokens(shape: tuple[int, int]) -> mx.array:
    return mx.zeros(shape, mx.int32)
