"""What is measured of hybrids and of models that can't be taken apart, in this process."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from small_models import _BASE, CONFIGS, VOCABULARY, build

from stages.core.config import schema
from stages.core.memory.alone import settle
from stages.core.memory.bench import Bench, is_recurrent
from stages.core.memory.fit import Model, Shape, Survey
from stages.core.memory.points import Point, Way


def folder_of(name, folder, **changes):
    """A model folder as mlx-lm reads it, of a small random model."""
    model = build(name, **changes)
    module, own, _ = CONFIGS[name]
    config = {**_BASE, **own, **changes, "model_type": module}
    if module == "qwen3_5":
        config = {"model_type": module, "text_config": {**config, "model_type": "qwen3_5_text"}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def bench(name, folder, layers=2, **changes):
    settle()
    train = schema.Train(num_layers=layers)
    return Bench(folder_of(name, folder, **changes), "stored", train, VOCABULARY, warm=False)


def survey(made, points):
    readings = {}
    for point in points:
        made.make_ready(point)
        readings[point] = made.read(point)
    return Survey(made.rest, readings)


def layers_points(way, widths=(16, 32, 48)):
    return [Point("layers", 1, width, 8, 16, way) for width in widths]


def test_m2_recurrent_layers_are_recognised_and_their_state_is_in_the_prediction(tmp_path):
    """Two of four layers step through time; heads x key size x value size x 4 bytes a token."""
    state = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    made = bench("qwen3_5", tmp_path, layers=4, **state)
    assert [is_recurrent(layer) for layer in made.model.layers] == [True, False, True, False]
    assert made.rest.recurrent == 2
    assert made.rest.attention == 2
    found = survey(made, [*layers_points(Way()), *layers_points(Way(recompute=1))])
    model = Model(found)
    per_token = float(model.kept(Way(), Shape(1, 101, 1)) - model.kept(Way(), Shape(1, 100, 1)))
    assert per_token > 2 * 8 * 64 * 64 * 4
    longer = Point("layers", 1, 96, 8, 16, Way())
    measured = survey(made, [longer]).readings[longer]
    predicted = float(model.peak(Way(), Shape(1, 96, 8), 16))
    assert predicted == pytest.approx(measured.peak, rel=0.1)
    again = Point("layers", 1, 96, 8, 16, Way(recompute=1))
    measured = survey(made, [again]).readings[again]
    assert float(model.peak(again.way, Shape(1, 96, 8), 16)) == pytest.approx(
        measured.peak, rel=0.1
    )
    assert measured.peak < 0.8 * predicted


def test_a_model_that_cannot_be_taken_apart_is_measured_whole(tmp_path):
    made = bench("nanbeige_looped", tmp_path)
    assert not made.rest.at_targets
    assert "loss at targets is off" in made.rest.notes[0]
    with pytest.raises(ValueError, match="can't be run alone"):
        made.read(Point("head", targets=8, loss_chunk=4))
    cached = Point("layers", 1, 16, 8, 16, Way(cached=True))
    made.make_ready(cached)
    with pytest.raises(ValueError, match="activation cache is off"):
        made.read(cached)
    found = survey(made, layers_points(Way()))
    assert all(reading.kept == 0 for reading in found.readings.values())
    # All logits are made: 160 of them a token at least.
    peaks = [found.readings[point].peak for point in layers_points(Way())]
    assert peaks[2] - peaks[0] > 32 * VOCABULARY * 4


def test_the_frozen_layers_are_freed_before_the_first_stored_point(tmp_path):
    made = bench("llama_untied", tmp_path)
    whole = made.rest.whole
    point = Point("layers", 2, 16, 8, 16, Way(cached=True))
    made.make_ready(point)
    arrays = tree_flatten(made.model.layers[3].parameters())
    layer = sum(x.nbytes for name, x in arrays if "lora" not in name)
    embedding = VOCABULARY * 64 * 4
    assert whole - made.rest.above == pytest.approx(2 * layer + embedding, rel=0.02)
    assert made.read(point).peak > 0


def test_the_check_switches_off_what_is_wrong_here(tmp_path):
    made = bench("llama", tmp_path)
    point = Point("check", 1, 12, 6, 16, Way(recompute=1, attention_block=4))
    head = made.step.staged.head
    made.step.staged.head = lambda hidden, parameters={}: head(hidden, parameters) * 1.01
    made.read(point)
    assert not made.rest.at_targets
    assert "loss at targets is off" in made.rest.notes[0]


def test_the_optimizers_state_is_at_rest(tmp_path):
    made = bench("llama", tmp_path)
    assert made.rest.state == pytest.approx(3 * made.rest.trained, rel=0.02)
    reading = made.read(Point("update"))
    assert reading.peak >= 2 * made.rest.trained
