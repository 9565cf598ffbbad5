"""What a child measures: the model as trained, the examples, the settings. Needs MLX prepared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mlx import nn

from benchmarks import shapes
from benchmarks.spec import Spec
from stages.core.config import schema
from stages.core.machine.device import Device
from stages.core.memory import rule
from stages.core.memory.plan import Plan
from stages.core.model import models
from stages.core.model.manifest import Manifest, read_manifest
from stages.core.model.trainable import Attached, attach
from stages.core.tables import Examples, read_examples
from stages.core.update import batching


@dataclass(frozen=True)
class Subject:
    """A loaded model with adapters, and all that a run of either side needs.

    Attributes:
        device: What computes.
        settings: With learning rate 0 every pass sees the same weights, so the losses of both sides
            can be compared, and an update costs what it always does.
        manifest, model, attached: Of the model.
        examples: Each with one range of targets that ends with its last token.
    """

    device: Device
    settings: schema.Settings
    manifest: Manifest
    model: nn.Module
    attached: Attached
    examples: Examples


def settings_of(spec: Spec) -> schema.Settings:
    """The settings of a run: the workspace's model, and what the spec says."""
    if spec.shape is None:
        from stages.core.config.settings import load_settings

        settings = load_settings()
    else:
        settings = schema.Settings(model=schema.Model(repo="builtin:tiny", dtype=spec.dtype))
    train = replace(
        settings.train,
        fine_tune_type=spec.fine_tune_type,
        num_layers=spec.layers,
        lora_parameters=replace(settings.train.lora_parameters, rank=spec.rank),
        learning_rate=spec.learning_rate,
        schedule=schema.Schedule(),
        effective_batch_size=spec.effective,
        epochs=float(spec.passes),
        updates=None,
        stop_at_update=None,
        clip_norm=None,
        updates_per_eval=None,
        patience=None,
    )
    split = replace(settings.split, max_seq_length=spec.cap)
    return replace(settings, train=train, split=split)


def manifest_of(spec: Spec) -> Manifest:
    """The workspace's manifest, or that of a random model."""
    if spec.shape is None:
        return read_manifest()
    return shapes.manifest(spec.shape, spec.dtype, spec.bits)


def examples_of(spec: Spec) -> Examples:
    """The examples of a run."""
    return read_examples(Path(spec.examples))


def load(spec: Spec, device: Device, settings: schema.Settings, lazy: bool) -> Subject:
    """Load the model and attach what is trained; `lazy`: weights stay unread until used."""
    manifest = manifest_of(spec)
    if spec.shape is None:
        folder = models.folder(manifest, settings.model)
        model, _ = models.load_model(folder, settings.model.dtype, lazy=lazy)
    else:
        model = shapes.build(spec.shape, spec.dtype, bits=spec.bits)
    attached = attach(model, settings.train)
    return Subject(device, settings, manifest, model, attached, examples_of(spec))


def equal_rows(spec: Spec, manifest: Manifest, examples: Examples, kind: str = "cpu") -> Plan:
    """A plan with as many rows in a micro-batch as mlx-lm's batch; the rest is the rule's.

    Args:
        kind: `cpu`, `cuda` or `metal`.
    """
    widths = batching.widths(examples.lengths, spec.cap)
    plan = Plan(
        batch_size=spec.rows,
        batch_tokens=spec.rows * widths[-1],
        widths=widths,
        loss_chunk=rule.loss_chunk(manifest.embedding_rows, kind),
        attention_block=rule.ATTENTION_BLOCK[kind],
        compiled=rule.COMPILED[kind],
        start_tokens=rule.STARTS[kind],
    )
    changes = dict(spec.plan)
    if "batch_size" in changes and "batch_tokens" not in changes:
        changes["batch_tokens"] = changes["batch_size"] * widths[-1]
    return replace(plan, **changes)
