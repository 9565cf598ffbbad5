"""Hand over from the frozen layers to their stored activations: check first, then free.

The check needs the whole model, so its good outcome is kept in the folder: the next run with the
same data, model and way of computing never reads the weights of the frozen layers.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from stages.core import files
from stages.core.activations.reader import Activations
from stages.core.errors import UserError
from stages.core.fingerprint import fingerprint
from stages.core.layers.guard import RelativeErrors, compare
from stages.core.layers.staged import Boundary, StagedModel, UnsupportedModel, swapped_parameters
from stages.core.memory.recovery import of_exception
from stages.core.update.batching import MicroBatch
from stages.core.update.check import COARSE_TOLERANCE, TOLERANCE
from stages.core.update.loss import plain_loss
from stages.core.update.step import Step

CHECKS = "checks.json"


def hand_over(step: Step, store: Activations, micro: MicroBatch) -> str:
    """Check the stored activations and the plan on a real micro-batch, then free what is below.

    Afterwards the step works with boundaries only, and all weights that it needs are in memory.

    Args:
        step: Its `check` is called where this way of computing was not checked before.
        store: Of the split that `micro` is of.
        micro: With at least one target, small: the plain way makes all logits.

    Returns:
        "", or why the cache can't be used; then nothing was freed.
    """
    boundary = store.boundary(micro)
    if not _checked(step, store):
        if problem := _problem(step, micro, boundary):
            return problem
        notes = step.check(micro)
        if step.staged is None:
            return "the layers above can't be run alone"
        if not notes:
            _keep(step, store)
    try:
        step.staged.free_below(step.attached.cut)
    except UnsupportedModel as error:
        return error.reason
    read_and_free_embedding(step.staged, mx.array(micro.tokens_BT), boundary, step.attached.cut)
    mx.clear_cache()
    return ""


def errors(staged: StagedModel, micro: MicroBatch, boundary: Boundary, cut: int) -> RelativeErrors:
    """Errors of loss and whole gradient from a stored boundary against the whole model."""
    tokens_BT, mask_BT = mx.array(micro.tokens_BT), mx.array(micro.mask_BT)

    def stored() -> mx.array:
        logits_BTV = staged.logits(tokens_BT, boundary, cut)
        return plain_loss(logits_BTV, tokens_BT, mask_BT, micro.targets)

    def whole() -> mx.array:
        return plain_loss(staged.model(tokens_BT), tokens_BT, mask_BT, micro.targets)

    return compare(staged.model, stored, whole)


def _problem(step: Step, micro: MicroBatch, boundary: Boundary) -> str:
    try:
        found = errors(step.staged, micro, boundary, step.attached.cut)
    except Exception as error:
        if of_exception(error) is not None:
            raise  # says nothing about the cache
        # Whatever an architecture's code raises where its layers are stubs.
        return (str(error).splitlines() or [type(error).__name__])[0]
    float32 = all(array.dtype == mx.float32 for array in boundary.values())
    most = TOLERANCE if float32 else COARSE_TOLERANCE
    if all(error <= most for error in found):  # not so for NaN
        return ""
    return (
        f"on a real micro-batch loss is off by {found.loss:.1e}, gradient by {found.gradient:.1e}"
    )


def _checked(step: Step, store: Activations) -> bool:
    return _way(step) in _known(store)


def _keep(step: Step, store: Activations) -> None:
    files.write_json(store.folder / CHECKS, sorted({*_known(store), _way(step)}))


def _known(store: Activations) -> list[str]:
    try:
        return files.read_json(store.folder / CHECKS)
    except UserError:
        return []


def _way(step: Step) -> str:
    """What the outcome of a check hangs on, beside the folder's own identity."""
    plan = step.plan
    kinds = sorted({type(m).__name__ for m in step.model.modules()})
    return fingerprint(
        {
            "kinds of modules": kinds,
            "recompute": [plan.recompute, plan.recompute_place],
            "loss_chunk": plan.loss_chunk > 0,
            "attention_block": plan.attention_block,
            "compiled": plan.compiled,
        }
    )


def read_and_free_embedding(
    staged: StagedModel, tokens_BT: mx.array, boundary: Boundary, cut: int
) -> None:
    """Read all weights that the upper part uses, and let go of embeddings that it does not.

    An embedding is unused if the logits stay finite while it holds NaN: not so for a tied head or
    for embeddings that go into each layer.
    """
    for name, module in staged.model.named_modules():
        if not isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            continue
        key = "scales" if isinstance(module, nn.QuantizedEmbedding) else "weight"
        blank = {f"{name}.{key}": _constant(module[key], float("nan"))}
        with swapped_parameters(staged.model, blank):
            unused = not mx.isnan(staged.logits(tokens_BT, boundary, cut)).any().item()
        if unused:
            for key in [k for k, x in module.items() if isinstance(x, mx.array)]:
                module[key] = _constant(module[key], 0)
    mx.eval(staged.logits(tokens_BT, boundary, cut))


def _constant(array: mx.array, value: float) -> mx.array:
    return mx.broadcast_to(mx.array(value, array.dtype), array.shape)
