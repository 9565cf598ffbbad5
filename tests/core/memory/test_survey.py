"""Real measurements of the built-in tiny model in a child process, which may die."""

import resource
import sys
from dataclasses import replace

import numpy as np
import pytest
from machines import examples

from stages.core.config import schema
from stages.core.config.schema import Settings
from stages.core.errors import UserError
from stages.core.machine import device
from stages.core.memory.child import Child
from stages.core.memory.choose import choose
from stages.core.memory.fit import Model, Shape
from stages.core.memory.points import Point, Way, reading_from
from stages.core.memory.survey import Surveyor
from stages.core.model import models
from stages.core.model.trainable import attach

CACHED = Way(cached=True)
FEW = [
    Point("check", 1, 16, 8, 16, Way(recompute=1, attention_block=8)),
    Point("frozen", 1, 64),
    Point("update"),
    Point("head", targets=64, loss_chunk=32),
    Point("layers", 1, 64, 8, 16, CACHED),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Settings, manifest, device of the tiny model; its folder is made once."""
    folder = tmp_path_factory.mktemp("survey")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        given = Settings(model=schema.Model(repo="builtin:tiny"))
        given.train.num_layers, given.train.updates = 2, 1
        yield given, models.build_manifest(given.model), device.prepare("cpu")


def test_points_are_measured_once(tiny):
    lines = []
    with Surveyor(*tiny, note=lines.append) as surveyor:
        found = surveyor.ask(FEW)
        assert surveyor.measured == len(lines) == 5
        surveyor.ask(FEW)
        assert surveyor.measured == 5
    rest = found.rest
    assert (rest.layers, rest.cut, rest.recurrent, rest.attention) == (4, 2, 0, 4)
    assert rest.at_targets
    assert rest.notes == ()
    # Half of the four layers are freed; weights are float32: 4 bytes each.
    assert rest.whole == pytest.approx(tiny[1].parameters * 4 + rest.trained, rel=0.01)
    assert 0.5 * rest.whole < rest.above < 0.7 * rest.whole
    # Adam's two moments and the summed gradient, all float32 like the adapters.
    assert rest.state == pytest.approx(3 * rest.trained, rel=0.01)
    assert all(x.peak > 0 and x.seconds > 0 and not x.died for x in found.readings.values())
    with Surveyor(*tiny) as again:
        known = again.ask(FEW)
        assert again.measured == 0
    assert known.readings == found.readings


def test_what_is_trained_has_a_survey_of_its_own(tiny):
    from dataclasses import replace

    given = replace(tiny[0], train=replace(tiny[0].train, num_layers=-1))
    with Surveyor(given, *tiny[1:]) as surveyor:
        found = surveyor.ask([Point("layers", 1, 32, 8, 16), Point("frozen", 1, 32)])
    assert found.rest.cut == 0
    assert found.readings[Point("frozen", 1, 32)].died


def test_peaks_of_a_longer_step_follow_from_short_ones(tiny):
    asked = list(FEW)
    for k in (0, 1):
        way = Way(k, cached=True)
        asked += [Point("layers", b, t, 8, 16, way) for b, t in ((1, 64), (2, 64), (1, 256))]
    unseen = [Point("whole", 2, 400, 300, 32, Way(k, cached=True)) for k in (0, 1)]
    with Surveyor(*tiny) as surveyor:
        model = Model(surveyor.ask(asked))
        found = surveyor.ask(unseen)
    for point in unseen:
        predicted = float(model.peak(point.way, Shape(2, 400, 300), 32))
        assert predicted == pytest.approx(found.readings[point].peak, rel=0.2)


def test_known_measurements_give_another_budgets_choice_at_once(tiny):
    """Half a second on two quiet cores; the promise is 3 s."""
    given, manifest, here = tiny
    train, valid = examples([40, 90, 64, 30] * 8, prompt=4), examples([50], prompt=4)
    chosen = []
    for gb in (4, 4, 3):
        memory = replace(given.memory, budget_gb=gb)
        chosen.append(choose(replace(given, memory=memory), manifest, train, valid, here))
    assert [choice.points > 0 for choice in chosen] == [True, False, False]
    assert all(choice.measured_worst for choice in chosen)
    assert chosen[1].plan == chosen[0].plan
    assert chosen[2].budget.gb == 3
    assert chosen[1].seconds < 15


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits work on Linux only")
def test_a_probe_that_dies_is_a_data_point(tiny):
    with Surveyor(*tiny) as surveyor:
        surveyor.ask([Point("update"), Point("layers", 1, 16, 8, 16)], again=True)
        process = surveyor._child._process
        with open(f"/proc/{process.pid}/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + (64 << 20)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        large, small = Point("whole", 4, 2048, 9, 16), Point("layers", 1, 20, 8, 16)
        found = surveyor.ask([large, small])
    assert found.readings[large].died
    assert found.readings[small].peak > 0, "a fresh child goes on"
    with Surveyor(*tiny) as again:
        assert large not in again.ask([small]).readings, "a death counts today, not for ever"


def test_a_model_that_cannot_be_loaded(tiny, monkeypatch):
    with Surveyor(*tiny) as surveyor:
        surveyor._rest = None
        monkeypatch.setattr(
            surveyor, "_request", lambda: {"folder": "nowhere", "dtype": "stored", "train": {}}
        )
        with pytest.raises(UserError, match="cannot be loaded"):
            surveyor.ask([Point("layers", 1, 24, 8, 16)])


def test_what_the_user_can_mend_is_said_as_it_is(tiny):
    settings, manifest, _ = tiny
    train = replace(settings.train, lora_parameters=schema.LoraParameters(keys=["no.such"]))
    model, _ = models.load_model(models.folder(manifest, settings.model))
    with pytest.raises(UserError) as here:
        attach(model, train)
    with (
        pytest.raises(UserError) as there,
        Surveyor(replace(settings, train=train), *tiny[1:]) as s,
    ):
        s.ask([Point("update")])
    assert there.value.record() == here.value.record()


def test_the_child_says_what_went_wrong():
    child = Child({"device": "cpu"})
    try:
        assert "KeyError" in child.measure(Point("update")).died
        assert not child.alive
    finally:
        child.close()


def test_readings_travel_as_json():
    from stages.core.memory.points import Reading

    reading = Reading(Point("whole", 2, 3, 4, 5, Way(2, "last", 6, cached=True)), 7, 8, 0.5)
    assert reading_from(reading.record()) == reading


def test_micro_batches_have_the_shape_that_is_asked(tiny):
    from stages.core.memory.bench import Bench

    bench = Bench.__new__(Bench)
    bench.vocabulary = 50
    for rows, width, targets in ((1, 8, 3), (3, 10, 7), (2, 5, 8), (4, 2, 1)):
        micro = bench.micro_batch(Point("whole", rows, width, targets))
        assert micro.tokens_BT.shape == (rows, width)
        assert micro.targets == targets == np.count_nonzero(micro.mask_BT)
        assert not micro.mask_BT[:, 0].any()
        assert micro.tokens_BT.max() < 50
