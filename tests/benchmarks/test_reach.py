"""When a loss is reached, on curves made by hand."""

import pytest

from benchmarks import reach


def curve(*pairs):
    return [{"update": i, "seconds": s, "loss": x} for i, (s, x) in enumerate(pairs)]


def test_a_loss_is_reached_at_the_first_point_that_is_not_above_it():
    falling = curve((0, 3.0), (10, 2.5), (20, 2.0), (30, 1.5))
    assert reach.reached(falling, 2.0) == 20
    assert reach.reached(falling, 2.2) == 20
    assert reach.reached(falling, 1.0) is None
    # A loss that rises again was reached nevertheless.
    assert reach.reached(curve((0, 3.0), (10, 1.9), (20, 2.1)), 2.0) == 10


def test_sides_are_compared_at_the_first_ones_last_loss():
    sides = {name: {"curve": [{"update": i, "seconds": s} for i, s in enumerate(seconds)]}
             for name, seconds in (("mlx-lm", (0, 30, 60)), ("ours", (0, 15, 20)))}  # fmt: skip
    found = reach.compared(sides, {"mlx-lm": [3.0, 2.5, 2.4], "ours": [3.0, 2.6, 2.3]})
    assert found["loss"] == 2.4
    assert found["sides"]["mlx-lm"]["reached_s"] == 60
    assert found["sides"]["ours"]["reached_s"] == 20
    assert found["sides"]["ours"]["times_faster"] == 3.0
    never = reach.compared(sides, {"mlx-lm": [3.0, 2.5, 2.4], "ours": [3.0, 2.6, 2.5]})
    assert never["sides"]["ours"]["reached_s"] is None
    assert never["sides"]["ours"]["times_faster"] is None


def test_a_curve_lacks_no_loss():
    with pytest.raises(ValueError, match="shorter"):
        reach.compared({"mlx-lm": {"curve": [{"update": 0, "seconds": 0}] * 2}}, {"mlx-lm": [1.0]})
