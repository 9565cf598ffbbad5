"""What of a model is trained: LoRA, DoRA or whole layers, through mlx-lm's own layers.

`attach` is the one place that draws the initial values of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import get_total_parameters

from stages.core.config import schema
from stages.core.config.settings import nearest
from stages.core.errors import UserError, listed

CONVERTIBLE = (
    nn.Linear,
    nn.QuantizedLinear,
    SwitchLinear,
    QuantizedSwitchLinear,
    nn.Embedding,
    nn.QuantizedEmbedding,
)
"""What `linear_to_lora_layers` wraps; besides, every module with a `to_lora` of its own."""
HEADS = ("lm_head", "embed_out", "output", "ff_out")
"""What mlx-lm's architectures call an output head that is not the embedding."""


@dataclass(frozen=True)
class Attached:
    """What is trained.

    Attributes:
        cut: Index of the first trained layer; 0 where something below the layers is trained, the
            number of layers where only the head is.
        num_layers_trained: Layers with at least one trained parameter.
        head_trained: The output head is trained (also where it is tied to a trained embedding).
        embeddings_trained: Something below or beside the layers is trained, so that no layer's
            output stays the same during training.
        trained_parameters: Numbers that the optimizer changes.
        total_parameters: Numbers of the base model.
    """

    cut: int
    num_layers_trained: int
    head_trained: bool
    embeddings_trained: bool
    trained_parameters: int
    total_parameters: int

    def line(self) -> str:
        """One plain line: which share of the model is trained, and where."""
        share = self.trained_parameters / self.total_parameters
        head = "trained" if self.head_trained else "frozen"
        embeddings = "trained" if self.embeddings_trained else "frozen"
        return (
            f"trains {self.trained_parameters:,} numbers ({share:.2%} of the model's"
            f" {self.total_parameters:,}) in {self.num_layers_trained} layers from layer"
            f" {self.cut} up; embeddings {embeddings}, head {head}"
        )


def attach(model: nn.Module, train: schema.Train) -> Attached:
    """Freeze the model and make the asked part of it trainable; initial values from `train.seed`.

    `num_layers` counts from the top, -1 means all. `full` unfreezes whole layers (embeddings, final
    norm and head stay frozen, as in mlx-lm); LoRA and DoRA wrap every module in `keys`, or all that
    can be wrapped.

    Raises:
        UserError: More layers than there are, a key that names nothing, `full` on quantized
            weights, or a layer that mlx-lm cannot adapt.
    """
    total = get_total_parameters(model)
    count = _layer_count(model, train.num_layers)
    model.freeze()
    if train.fine_tune_type == "full":
        _refuse_quantized(model)
        for layer in model.layers[-count:]:
            layer.unfreeze()
    else:
        _check_keys(model, train.lora_parameters.keys)
        mx.random.seed(train.seed)
        wrap(model, count, lora_config(train), train.fine_tune_type)
    mx.eval(model.trainable_parameters())
    attached = _describe(model, total)
    if attached.trained_parameters == 0:
        raise UserError(
            "These settings train nothing",
            where="train.lora_parameters.keys, train.num_layers",
            found=f"keys={train.lora_parameters.keys}, num_layers={train.num_layers}",
            expected="at least one module in the trained layers",
            fix="raise train.num_layers or choose other keys",
        )
    return attached


def trained(model: nn.Module) -> dict[str, mx.array]:
    """The trained arrays by mlx-lm's names (`model.layers.7.self_attn.q_proj.lora_a`)."""
    return dict(tree_flatten(model.trainable_parameters()))


def layer_keys(model: nn.Module) -> list[str]:
    """Module paths inside a layer that LoRA can take, over all layers, sorted."""
    found: set[str] = set()
    for layer in model.layers:
        found.update(_convertible(layer))
    return sorted(found)


def outer_keys(model: nn.Module) -> list[str]:
    """Module paths outside the layers that LoRA can take (embeddings, an untied head), sorted."""
    inside = inside_layers(model)
    return sorted(name for name in _convertible(model) if not name.startswith(inside))


def has_head(model: nn.Module) -> bool:
    """Whether the model has an output head of its own (else the embedding serves as head)."""
    inside = inside_layers(model)
    return any(
        name.rsplit(".", 1)[-1] in HEADS and not name.startswith(inside)
        for name, _ in model.named_modules()
    )


def _layer_count(model: nn.Module, asked: int) -> int:
    have = len(model.layers)
    if asked > have:
        raise UserError(
            "train.num_layers is more than the model has",
            where="train.num_layers",
            found=asked,
            expected=f"1 to {have}, or -1 for all",
            fix=f"set train.num_layers={have} or less",
        )
    return have if asked == -1 else asked


def _refuse_quantized(model: nn.Module) -> None:
    quantized = [name for name, module in model.named_modules() if hasattr(module, "bits")]
    if quantized:
        raise UserError(
            "Full fine-tuning needs weights that are not quantized",
            where="train.fine_tune_type",
            found=f"full, and quantized modules: {listed(quantized)}",
            expected="lora or dora on this model",
            fix="set train.fine_tune_type=lora, or choose the model's unquantized version",
        )


def _check_keys(model: nn.Module, keys: list[str] | None) -> None:
    known = layer_keys(model) + outer_keys(model)
    unknown = [key for key in keys or () if key not in known]
    if unknown:
        close = [name for name in (nearest(key, known) for key in unknown) if name]
        raise UserError(
            "train.lora_parameters.keys names no module of the model",
            where="train.lora_parameters.keys",
            found=", ".join(unknown),
            expected="of " + ", ".join(known),
            fix=f"nearest: {', '.join(close)}" if close else "choose keys from the list",
        )


def lora_config(train: schema.Train) -> dict[str, Any]:
    """`train.lora_parameters` as mlx-lm wants them: without `keys` it takes every linear layer."""
    lora = train.lora_parameters
    values = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout}
    return {**values, "keys": list(lora.keys)} if lora.keys is not None else values


def wrap(model: nn.Module, count: int, lora: dict[str, Any], kind: str) -> None:
    """Put mlx-lm's LoRA or DoRA layers into the top `count` layers, initial values drawn now.

    Raises:
        UserError: A module cannot be wrapped.
    """
    try:
        linear_to_lora_layers(model, count, lora, use_dora=kind == "dora")
    except (AttributeError, ValueError) as error:
        raise UserError(
            f"mlx-lm cannot add {kind} layers to this model",
            where="train.fine_tune_type, train.lora_parameters.keys",
            found=error,
            expected="keys of modules that it can wrap: " + ", ".join(layer_keys(model)),
            fix="set train.lora_parameters.keys to the attention projections only"
            + (", or train.fine_tune_type=lora" if kind == "dora" else ""),
        ) from error


def _convertible(module: nn.Module) -> list[str]:
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, CONVERTIBLE) or hasattr(part, "to_lora")
    ]


def inside_layers(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of the layers' parameter names, found by identity (`model.layers.7.`)."""
    layers = {id(layer) for layer in model.layers}
    return tuple(name + "." for name, part in model.named_modules() if id(part) in layers)


def _describe(model: nn.Module, total: int) -> Attached:
    names = trained(model)
    with_trained = [
        index
        for index, layer in enumerate(model.layers)
        if tree_flatten(layer.trainable_parameters())
    ]
    outside = [name for name in names if not name.startswith(inside_layers(model))]
    head = [name for name in outside if set(name.split(".")) & set(HEADS)]
    below = len(outside) > len(head)
    return Attached(
        cut=0 if below else min(with_trained, default=len(model.layers)),
        num_layers_trained=len(with_trained),
        head_trained=bool(head) or (below and not has_head(model)),
        embeddings_trained=below,
        trained_parameters=sum(array.size for array in names.values()),
        total_parameters=total,
    )
