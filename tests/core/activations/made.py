"""Activations of small random models, for tests: examples, a source, a step."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from stages.core.activations.prepare import Source
from stages.core.config import schema
from stages.core.layers.staged import StagedModel
from stages.core.memory.plan import Plan
from stages.core.tables import Examples
from tests.core.small_models import VOCABULARY, add_lora, build

LENGTHS = (5, 17, 3, 30, 12, 12, 21, 1)
PLAN = Plan(batch_size=4, batch_tokens=64, widths=(16, 32))


def examples(lengths=LENGTHS, seed=0):
    """Random tokens; each but the first is a target with chance one half, the last one surely."""
    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = draw.random(offsets[-1]) < 0.5
    mask[offsets[1:] - 1] = True
    mask[offsets[:-1]] = False
    count = np.arange(len(lengths))
    tokens = draw.integers(0, VOCABULARY, offsets[-1]).astype(np.int32)
    return Examples(offsets, tokens, mask, count, np.zeros(len(lengths), np.int32))


def lora_model(name="llama", cut=2, dtype=None, **changes):
    """A small model with LoRA on the layers from `cut` up, in float32 or `dtype`."""
    model = build(name, **changes)
    if dtype is not None:
        model.set_dtype(dtype)
    add_lora(model, len(model.layers) - cut)
    return model


def manifest(model, name="model"):
    """What identity and size read of a manifest."""
    return SimpleNamespace(
        files={name: {"sha256": "0" * 64, "bytes": 1}},
        dtype="float32",
        bytes=1,
        hidden_size=64,
        num_layers=len(model.layers),
    )


def source(model, cut, plan=PLAN, name="model", **memory):
    """What activations are made from; the staged model is `.staged`, to be closed."""
    settings = schema.Memory(**memory)
    return Source(StagedModel(model), cut, manifest(model, name), plan, settings, "cpu")


def folders(workspace):
    """The folders of activations in a workspace, whole or not."""
    root = workspace / ".cache/activations"
    return sorted(x.name for x in root.iterdir() if x.is_dir()) if root.exists() else []


def evaluated(boundary):
    """A boundary as NumPy arrays, bits for bfloat16."""
    mx.eval(boundary)
    return {
        name: np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
        for name, x in boundary.items()
    }
