"""The trials of one architecture: each memory setting against the whole model, the real way."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from stages.core.activations.handover import hand_over
from stages.core.activations.prepare import Source, prepare
from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.layers.guard import perturbed_adapters
from stages.core.layers.staged import UnsupportedModel, layer_list
from stages.core.memory.attention import blocked
from stages.core.memory.plan import Plan
from stages.core.model.trainable import Attached, attach, layer_keys
from stages.core.tables import Examples
from stages.core.update import batching
from stages.core.update.loss import global_norm, plain_loss
from stages.core.update.step import Step
from tests.core import model_configs

LENGTHS = (12, 9, 10)  # longer than the sliding windows of 8
PLAN = Plan(batch_size=4, batch_tokens=64, widths=(12,), loss_chunk=4)
RECOMPUTE, BLOCKS = replace(PLAN, recompute=1), replace(PLAN, attention_block=4)
KEYS_NOTE = (
    "mlx-lm cannot train LoRA on every linear layer; tried with the attention projections as"
    " train.lora_parameters.keys"
)


class NoGradientError(Exception):
    """mlx-lm's own model and loss give no gradient."""


class Trial:
    """One architecture, and how LoRA is put on it.

    Attributes:
        count: Its layers.
        note: "", or that some linear layers had to be left out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        model = model_configs.build(name)
        self.count = len(layer_list(model))
        self.split = examples()
        self.micro = batching.micro_batch(self.split, np.arange(len(LENGTHS)), PLAN)
        mx.eval(model(mx.array(self.micro.tokens_BT)))
        self.keys, self.note = None, ""
        try:
            whole_gradient(self.model(self.count - 1)[0], self.micro)
        except (NoGradientError, UserError):
            self.keys, self.note = attention_projections(model), KEYS_NOTE
            whole_gradient(self.model(self.count - 1)[0], self.micro)

    def model(self, layers: int) -> tuple[nn.Module, Attached]:
        """A new model with LoRA on its top layers."""
        train = schema.Train(num_layers=layers, updates=1)
        train.lora_parameters.keys = self.keys
        model = model_configs.build(self.name)
        return model, attach(model, train)


def examine(name: str) -> dict[str, str]:
    """`model` and each setting -> "" where it works, else why not; see model_census."""
    try:
        trial = Trial(name)
    except NoGradientError as error:
        return {"model": f"mlx-lm itself cannot train it: {error}"}
    except SystemExit:
        return {"model": "its module wants a package that is not installed"}
    except Exception as error:
        return {"model": f"no model can be run here: {reason(error)}"}
    cuts = sorted({1, trial.count // 2, trial.count - 1})
    return {
        "model": "",
        "note": trial.note,
        "loss at targets": checked(trial, PLAN),
        "activation cache": next((why for cut in cuts if (why := cache(trial, cut))), ""),
        "recomputation": checked(trial, RECOMPUTE),
        "attention in blocks": attention_blocks(trial),
    }


def examples() -> Examples:
    """Random tokens, about half of them targets."""
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    tokens = draw.integers(1, model_configs.VOCABULARY, offsets[-1]).astype(np.int32)
    mask = draw.random(offsets[-1]) < 0.5
    mask[offsets[:-1]] = False
    rows = np.arange(len(LENGTHS))
    return Examples(offsets, tokens, mask, rows, np.zeros(len(LENGTHS), np.int32))


def attention_projections(model: nn.Module) -> list[str]:
    """Paths inside a layer of the projections of its attention."""
    return [key for key in layer_keys(model) if re.search(r"attn\.\w+_proj$", key)]


def whole_gradient(model: nn.Module, micro: batching.MicroBatch) -> None:
    """Raise NoGradientError where the model's own logits and loss have no finite gradient."""
    tokens_BT, mask_BT = mx.array(micro.tokens_BT), mx.array(micro.mask_BT)
    model.train()
    try:
        loss = lambda: plain_loss(model(tokens_BT), tokens_BT, mask_BT, micro.targets)
        gradient = nn.value_and_grad(model, loss)()[1]
        mx.eval(gradient)
    except Exception as error:
        raise NoGradientError(reason(error)) from error
    if not all(mx.isfinite(x).all().item() for _, x in tree_flatten(gradient)):
        raise NoGradientError("its gradient is not finite")


def checked(trial: Trial, plan: Plan) -> str:
    """What `Step.check` switches off of a plan, on a model with two layers trained."""
    step = Step(*trial.model(min(2, trial.count)), plan)
    notes = [x for x in step.check(trial.micro) if plan is PLAN or "loss at targets" not in x]
    step.close()
    return "; ".join(note.split(" is off: ", 1)[-1] for note in notes)


def attention_blocks(trial: Trial) -> str:
    """Blocks must be used at all, and give the same step."""
    model, _ = trial.model(1)
    with blocked(BLOCKS.attention_block) as calls:
        model(mx.array(trial.micro.tokens_BT))
    if not calls.blocked:
        return "it has no attention that mlx-lm's common function computes"
    return checked(trial, BLOCKS)


def cache(trial: Trial, cut: int) -> str:
    """Stored, read, checked, the layers below freed, and then a step against the whole model's."""
    step = Step(*trial.model(trial.count - cut), PLAN)
    try:
        return _cache(step, cut, trial.micro, trial.split)
    except UnsupportedModel as error:
        return error.reason
    except Exception as error:
        return reason(error)
    finally:
        step.close()


def _cache(step: Step, cut: int, micro: batching.MicroBatch, split: Examples) -> str:
    if step.staged is None:
        return step.notes[0].split(": ", 1)[1]
    if step.attached.cut != cut:
        return f"its layers from {step.attached.cut} up are trained, not from {cut}"
    step.staged.boundary_axes(cut)
    manifest = SimpleNamespace(files={}, dtype="float32", bytes=0)
    source = Source(step.staged, cut, manifest, PLAN, schema.Memory(), "cpu")
    stores = prepare(source, {"train": split})
    if stores is None:
        return "nothing could be stored"
    store = stores["train"]
    try:
        with perturbed_adapters(step.model):
            loss, gradient = step.gradient(micro, micro.targets)
        if problem := hand_over(step, store, micro):
            return problem
        with perturbed_adapters(step.model):
            stored_loss, stored = step.gradient(
                micro, micro.targets, boundary=store.boundary(micro)
            )
        return _difference(stored_loss, stored, loss, gradient)
    finally:
        store.close()


def _difference(loss: float, gradient: Any, wanted_loss: float, wanted: Any) -> str:
    a, b = dict(tree_flatten(gradient)), dict(tree_flatten(wanted))
    error = global_norm({name: a[name] - b[name] for name in b}) / global_norm(b)
    if abs(loss / wanted_loss - 1) <= 1e-5 and error <= 1e-5:
        return ""
    return f"after freeing, gradient off by {error:.1e}"


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
