"""Predictions against a machine on paper, whose peaks are known for every shape and way."""

from dataclasses import replace

import numpy as np
import pytest
from machines import MANIFEST, REST, peak, settings, survey

from stages.core.memory import agenda
from stages.core.memory.curves import fit
from stages.core.memory.fit import Model, Shape, Survey, stack
from stages.core.memory.points import Point, Reading, Way

WAYS = [Way(k, attention_block=b, cached=True) for k in (0, 1) for b in (0, 1)]


def points(ways=WAYS, longest=512):
    given = settings(updates=1)
    found = agenda.first(given, MANIFEST, longest, "cpu")
    return found + [p for way in ways for p in agenda.layers(MANIFEST, longest, "cpu", way)]


def test_coefficients_are_found_exactly():
    features = np.array([[1, 2, 4], [1, 3, 9], [1, 5, 25], [1, 8, 64]], float)
    assert fit(features @ [7, 2, 0.5], features) == pytest.approx((7, 2, 0.5))


def test_coefficients_are_never_negative():
    features = np.array([[1, 1, 1], [1, 2, 4], [1, 3, 9]], float)
    found = fit([10, 8, 6], features)
    assert min(found) >= 0


def test_nothing_is_predicted_from_zeros():
    assert fit([0, 0, 0], np.ones((3, 3))) == (0, 0, 0)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1024, 900), (8, 300, 1000), (3, 64, 5), (1, 2048, 2000)])
@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_lengths_that_were_never_measured(k, shape, chunk):
    shape, way = Shape(*shape), Way(k, cached=True)
    found = Model(survey(points())).peak(way, shape, chunk)
    assert found == pytest.approx(peak(way, shape, chunk), rel=0.02)


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("k", [0, 1])
def test_blocks_that_were_never_measured(k, block):
    way = Way(k, attention_block=block, cached=True)
    model = Model(survey(points()))
    for width in (48, 200, 1024):
        shape = Shape(2, width, 20)
        assert model.peak(way, shape, 32) == pytest.approx(peak(way, shape, 32), rel=0.03)


@pytest.mark.parametrize(
    ("k", "place"), [(2, "spread"), (4, "spread"), (2, "first"), (2, "last"), (3, "spread")]
)
def test_parts_of_the_layers_follow_from_none_and_all(k, place):
    way, shape = Way(k, place, cached=True), Shape(4, 384, 64)
    model = Model(survey(points()))
    assert model.peak(way, shape, 32) == pytest.approx(peak(way, shape, 32), rel=0.03)
    none, every = (model.seconds(Way(j, cached=True), shape, 32) for j in (0, 1))
    assert none < model.seconds(way, shape, 32) < every


def test_the_last_half_saves_less_than_the_first():
    model, shape = Model(survey(points())), Shape(4, 384, 64)
    first, last = (model.peak(Way(2, place, cached=True), shape, 32) for place in ("first", "last"))
    assert first < last


def test_a_loss_in_one_piece_binds_where_there_are_many_targets():
    given = settings(updates=1, loss_chunk="off")
    asked = agenda.first(given, MANIFEST, 512, "cpu")
    asked += [p for way in WAYS for p in agenda.layers(MANIFEST, 512, "cpu", way)]
    model, way, shape = Model(survey(asked)), Way(1, cached=True), Shape(4, 512, 1500)
    assert model.peak(way, shape, 0) == pytest.approx(peak(way, shape, 0), rel=0.02)


def test_the_whole_model_is_the_stored_way_and_the_frozen_layers():
    model, shape = Model(survey(points())), Shape(1, 100, 10)
    apart = model.seconds(Way(), shape, 32) - model.seconds(Way(cached=True), shape, 32)
    assert apart == pytest.approx(2e-3 * 100)
    assert model.peak(Way(), shape, 32) == model.peak(Way(cached=True), shape, 32)
    assert REST.resting(False) - REST.resting(True) == 310_000_000


def test_a_step_measured_whole_corrects_its_way_only():
    asked = points()
    shape, way = Shape(4, 512, 700), Way(1, cached=True)
    found = survey(asked)
    more = Point("whole", *shape, loss_chunk=64, way=way)
    reading = survey([more]).readings[more]
    found.readings[more] = type(reading)(more, int(1.1 * peak(way, shape, 64)))
    model, plain = Model(found), Model(survey(asked))
    assert model.peak(way, shape, 64) == pytest.approx(1.1 * peak(way, shape, 64), rel=1e-6)
    other = Way(0, cached=True)
    assert model.peak(other, shape, 64) == plain.peak(other, shape, 64)


def test_many_shapes_at_once_are_each_one_alone():
    model = Model(survey(points()))
    shapes = [Shape(1, 1024, 900), Shape(8, 64, 100), Shape(2, 300, 7)]
    for way in (Way(0, cached=True), Way(2, "first", 128), Way(1, attention_block=64)):
        for predicted in (model.peak, model.seconds):
            together = predicted(way, stack(shapes), 64)
            assert list(together) == pytest.approx([predicted(way, x, 64) for x in shapes])


def test_without_parts_of_the_model_the_layers_points_are_all():
    asked = [p for p in points() if p.kind == "layers"]
    model, shape = Model(survey(asked)), Shape(1, 256, 8)
    assert model.peak(Way(cached=True), shape, 64) == pytest.approx(
        peak(Way(cached=True), shape, 8), rel=0.03
    )


@pytest.mark.parametrize(
    ("trained", "peak", "expected"),
    [
        # SmolLM2-135M as it was measured, 48 tokens: LoRA on 8 layers, where 256 tokens took
        # 0.395 GB, and all of it trained, where they took 1.331 GB.
        (2_605_056, 73_981_328, 73_981_328 * 256 / 48),
        (424_811_520, 1_331_095_004, 3 * 424_811_520 + 56_660_444 * 256 / 48),
    ],
    ids=["lora", "full"],
)
def test_the_check_of_a_plan_grows_with_its_tokens_but_for_whole_gradients(trained, peak, expected):
    point = Point("check", 1, 48, 24, 16, Way(1, attention_block=16))
    rest = replace(REST, trained=trained)
    found = Model(Survey(rest, {point: Reading(point, peak=peak)})).check_peak(256)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found < 1.6e9
