"""A machine and a model that exist on paper: readings by a formula, so predictions can be checked.

Each trained layer keeps `KEPT` bytes per token, and `SCORES` per token and key; a recomputed one
`INPUT` per token. The backward pass works on one layer at a time: on attention, with `WORKS` per
token and key and `ASIDE` per token, or on all else, with `OTHERS` per token. The loss takes
`LOGITS` per target of a piece and `BESIDE` per target. A token costs 1 ms, recomputation a third
more, a step `ONCE` seconds on top. Kept from running ahead it needs `HELD_BACK` of its memory.
"""

from dataclasses import replace

import numpy as np

from stages.core.config.schema import Settings
from stages.core.machine.device import Device
from stages.core.memory.fit import Shape, Survey
from stages.core.memory.placement import chosen_layers
from stages.core.memory.points import Reading, Rest
from stages.core.model.manifest import Manifest, Source
from stages.core.tables import Examples

LAYERS, FROZEN = 8, 22
KEPT, SCORES, INPUT = 40_000, 40, 2_300
OTHERS, WORKS, ASIDE = 60_000, 300, 9_000
LOGITS, BESIDE = 1_500_000, 9_000
UPDATES, ONCE = 12, 0.1
HELD_BACK = 0.7
REST = Rest(
    whole=540_000_000,
    above=230_000_000,
    trained=2_600_000,
    state=7_800_000,
    layers=LAYERS + FROZEN,
    cut=FROZEN,
    recurrent=0,
    attention=LAYERS + FROZEN,
    causal=False,
    at_targets=True,
)
CPU = Device("cpu", "paper", "none", 2, 0.0, {"mlx": "0"})
MANIFEST = Manifest(
    name="paper",
    source=Source("builtin", repo="builtin:paper"),
    files={},
    model_type="llama",
    num_layers=LAYERS + FROZEN,
    hidden_size=576,
    vocab_size=49152,
    embedding_rows=49152,
    dtype="float32",
    quantization=None,
    tied=True,
    max_positions=2048,
    parameters=135_000_000,
    bytes=540_000_000,
    layer_keys=["self_attn.q_proj"],
    outer_keys=[],
    eos_token_ids=[0],
    has_chat_template=True,
    system_role=True,
)


def kept(way, rows, width):
    """Bytes kept for the backward pass."""
    keys = 0 if 0 < way.attention_block < width else width
    full = rows * width * (KEPT + SCORES * keys)
    again = len(chosen_layers(range(LAYERS), way.recompute, way.place))
    return (LAYERS - again) * full + again * rows * width * INPUT


def layers_peak(way, rows, width):
    """Bytes at the backward pass's highest moment: at the top, or at the topmost recomputed one."""
    keys = min(width, way.attention_block or width)
    chosen = chosen_layers(range(LAYERS), way.recompute, way.place)
    tokens = rows * width
    one = tokens * (
        KEPT + SCORES * (0 if way.attention_block and way.attention_block < width else width)
    )
    working = tokens * max(OTHERS, ASIDE + WORKS * keys)
    highest = working
    if chosen:
        above = LAYERS - 1 - max(chosen)
        highest = max(working, working + one - above * one)
    return kept(way, rows, width) + highest


def head(targets, chunk):
    """Bytes of the loss alone."""
    return LOGITS * min(chunk or targets, targets) + BESIDE * targets


def peak(way, shape, chunk):
    """Bytes of a whole step."""
    more = BESIDE * max(0, shape.targets - 8)
    layers = layers_peak(way, shape.rows, shape.width) + more
    return max(layers, kept(way, shape.rows, shape.width) + head(shape.targets, chunk))


def read(point):
    """The reading that the paper machine gives."""
    way, tokens = point.way, point.rows * point.width
    share = len(chosen_layers(range(LAYERS), way.recompute, way.place)) / LAYERS
    seconds = ONCE + 1e-3 * tokens * (1 + share / 3)
    if point.kind == "layers":
        found = layers_peak(way, point.rows, point.width)
        return Reading(point, int(found), int(kept(way, point.rows, point.width)), seconds)
    if point.kind == "attention":
        keys = min(point.width, way.attention_block or point.width)
        held = 0 if way.attention_block else SCORES * tokens * point.width
        return Reading(point, WORKS * tokens * keys + held, held, 1e-4 * tokens)
    if point.kind == "whole":
        shape = Shape(point.rows, point.width, point.targets)
        found = peak(way, shape, point.loss_chunk)
        if point.limit_gb:
            allowed = point.limit_gb * 1e9 - REST.resting(way.cached)
            found = min(found, max(HELD_BACK * found, allowed))
        return Reading(point, int(found), 0, seconds)
    if point.kind == "head":
        return Reading(point, head(point.targets, point.loss_chunk), 0, 1e-4 * point.targets)
    if point.kind == "frozen":
        return Reading(point, 10_000 * tokens, 0, 2e-3 * tokens)
    return Reading(point, 5_000_000, 0, 0.01)


def survey(points):
    """What a surveyor would know after these points."""
    return Survey(REST, {point: read(point) for point in points})


class PaperSurveyor:
    """Stands in for `Surveyor`: answers by formula, dies where told to."""

    def __init__(self, *_args, dies=lambda point: "", off=False):
        self.readings = {}
        self.measured = 0
        self.dies = dies
        self.off = off

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def ask(self, points):
        for point in points:
            if point in self.readings:
                continue
            self.measured += 1
            reason = "activation cache is off" if self.off and point.way.cached else ""
            reason = reason or self.dies(point)
            self.readings[point] = Reading(point, died=reason) if reason else read(point)
        rest = replace(REST, above=REST.whole) if self.off else REST
        return Survey(rest, dict(self.readings))


def examples(lengths, prompt=10):
    """Examples of these lengths; all after the prompt are targets."""
    lengths = np.asarray(lengths)
    place = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.zeros(0, int)
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.ones(int(lengths.sum()), np.int32),
        target_mask=place >= prompt,
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def settings(effective=8, updates=UPDATES, **memory):
    """Settings of a run on paper."""
    made = Settings()
    made.model.repo = "builtin:paper"
    made.train.updates, made.train.effective_batch_size = updates, effective
    for key, value in memory.items():
        setattr(made.memory, key, value)
    return made
