"""Time of attention in blocks and in one piece, against laws that are written down here."""

from dataclasses import replace
from math import ceil

import pytest
from machines import REST, read

from stages.core.memory.curves import Shape
from stages.core.memory.fit import Model, Survey
from stages.core.memory.points import Point, Reading, Way
from stages.core.memory.seconds import AttentionSeconds

LAYERS = 8
START, TOKEN = 0.05, 1.5e-3


def one_piece(rows, width):
    """1 ms a call, 0.25 µs a score."""
    return 1e-3 + 0.25e-6 * rows * width * width


def in_blocks(rows, width, block):
    """0.4 ms a block, 10 µs a token; 0.3 µs a score, of those that a causal block sees."""
    spans = [(start, min(start + block, width)) for start in range(0, width, block)]
    scores = sum((end - start) * end for start, end in spans)
    return 0.4e-3 * ceil(width / block) + 10e-6 * rows * width + 0.3e-6 * rows * scores


def attention(rows, width, block):
    return in_blocks(rows, width, block) if 0 < block < width else one_piece(rows, width)


def reading(point):
    rows, width, block = point.rows, point.width, point.way.attention_block
    seconds = attention(rows, width, block)
    if point.kind == "attention":
        return Reading(point, 10 * rows * width, 0, seconds)
    again = 4 / 3 if point.way.recompute else 1
    total = START + again * (TOKEN * rows * width + LAYERS * seconds)
    made = read(point)
    return Reading(point, made.peak, made.kept, total)


ALONE = [(128, 0), (512, 0), (1024, 0), (1024, 64), (1024, 256), (128, 64)]
STEPS = [(1, 64, 0), (2, 64, 0), (1, 512, 0), (1, 128, 8), (1, 256, 16), (1, 256, 128)]


def model(steps=STEPS):
    points = [
        Point("attention", 1, width, way=Way(attention_block=block)) for width, block in ALONE
    ]
    points += [
        Point("layers", rows, width, 8, 16, Way(k, attention_block=block, cached=True))
        for rows, width, block in steps
        for k in (0, 1)
    ]
    return Model(Survey(replace(REST, causal=True), {point: reading(point) for point in points}))


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("shape", [(4, 384), (1, 1024), (4, 512)])
def test_the_law_of_blocks_is_found(block, shape):
    found = [reading(Point("attention", 1, w, way=Way(attention_block=b))) for w, b in ALONE if b]
    predicted = AttentionSeconds(found, causal=True).at(Shape(*shape, 1), block)
    assert predicted == pytest.approx(in_blocks(*shape, block), rel=1e-6)


@pytest.mark.parametrize("shape", [(4, 384), (1, 1024), (4, 128)])
def test_the_law_of_one_piece_is_found(shape):
    found = [reading(Point("attention", 1, w)) for w, b in ALONE if not b]
    predicted = AttentionSeconds(found, causal=True).at(Shape(*shape, 1), 0)
    assert predicted == pytest.approx(one_piece(*shape), rel=1e-6)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("block", [0, 64, 128])
@pytest.mark.parametrize("shape", [(4, 384), (1, 1024), (4, 128)])
def test_a_steps_seconds_are_attention_and_all_else(k, block, shape):
    again = 4 / 3 if k else 1
    rows, width = shape
    wanted = START + again * (TOKEN * rows * width + LAYERS * attention(rows, width, block))
    way = Way(k, attention_block=block, cached=True)
    assert float(model().seconds(way, Shape(*shape, 8), 64)) == pytest.approx(wanted, rel=1e-3)


def test_blocks_alone_measured_tell_their_time_too():
    made = model([step for step in STEPS if step[2]])
    way = Way(0, attention_block=64, cached=True)
    wanted = START + TOKEN * 1024 + LAYERS * in_blocks(1, 1024, 64)
    assert float(made.seconds(way, Shape(1, 1024, 8), 64)) == pytest.approx(wanted, rel=1e-3)
