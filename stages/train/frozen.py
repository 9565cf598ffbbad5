"""The frozen layers of a run: their stored output in their place, or nothing stored at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from stages.core import console
from stages.core.activations.handover import hand_over
from stages.core.activations.prepare import Source, prepare
from stages.core.activations.reader import Activations
from stages.core.config.settings import Settings
from stages.core.machine.device import Device
from stages.core.model.manifest import Manifest
from stages.core.tables import Examples
from stages.core.update.batching import MicroBatch
from stages.core.update.step import Step
from stages.train.stopping import Stop


def stored(
    step: Step,
    splits: Mapping[str, Examples],
    micro: MicroBatch,
    *,
    settings: Settings,
    manifest: Manifest,
    device: Device,
    stop: Stop,
) -> dict[str, Activations]:
    """Check the plan on a real micro-batch; where it asks for it, put activations on the disk.

    Args:
        step: Its weights may be unread. Without stored activations they are read here; with them,
            those of the frozen layers are gone afterwards.
        splits: `train` and `valid`.
        micro: Of `train`, with targets.
        stop: Looked at between micro-batches.

    Returns:
        The activations of each split that has examples; {} where the whole model runs.
    """
    if step.plan.activation_cache and step.staged is not None:
        cut = step.attached.cut
        source = Source(step.staged, cut, manifest, step.plan, settings.memory, device.kind)
        stores = prepare(source, splits, stop.check)
        if stores is not None:
            reason = hand_over(step, stores["train"], micro)
            if not reason:
                return stores
            console.warn(f"activation cache is off: {reason}")
            for store in stores.values():
                store.close()
    step.plan = replace(step.plan, activation_cache=False)
    mx.eval(step.model.parameters())
    step.check(micro)
    return {}
