import numpy as np
import pytest

from stages.report import svg
from tests.report.parsing import Page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 60, [0, 20, 40, 60]),
        (1.43, 2.48, [1.6, 1.8, 2.0, 2.2, 2.4]),
        (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]),
        (-0.7, 0.05, [-0.6, -0.4, -0.2, 0]),
        (0, 1e6, [0, 200000, 400000, 600000, 800000, 1000000]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert svg.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0002, "2e-4"),
        (0.000125, "1.25e-4"),
        (0.00002, "2e-5"),
        (-0.00002, "−2e-5"),
        (0.001, "0.001"),
        (1.75, "1.75"),
        (-0.6, "−0.6"),
        (1500, "1500"),
        (25000, "25k"),
        (1e6, "1M"),
        (2.5e9, "2.5G"),
    ],
)
def test_labels_are_short(value, text):
    assert svg.label(value) == text


def test_a_scale_maps_its_ends():
    scale = svg.Scale(10, 20, 100, 0)
    assert (scale(10), scale(15), scale(20)) == (100, 50, 0)


def test_thinning_keeps_the_extremes_and_the_order():
    y = np.zeros(10_000)
    y[1234], y[8765] = 5.0, -7.0
    x, thin = svg.thinned(np.arange(10_000.0), y, most=200)
    assert len(x) <= 200
    assert (np.diff(x) > 0).all()
    assert thin[x == 1234] == 5.0
    assert thin[x == 8765] == -7.0


def test_a_line_breaks_where_a_number_is_missing():
    box = svg.frame((0, 3), (0, 3), 475, 259)  # inside the margins: 403 wide, 203 high
    y = np.array([0.0, np.nan, 2.0, 3.0])
    d = svg.path(np.arange(4.0), y, box.across, box.up)
    assert d == "M58.0 217.0M326.7 81.7L461.0 14.0"


def test_one_value_and_none_at_all_can_be_drawn():
    for values in (np.array([2.0]), np.zeros(0), np.array([np.nan, np.nan])):
        line = svg.Line("loss", np.arange(len(values), dtype=float), values)
        box = svg.frame((0, 1), svg.padded(values))
        page = Page(svg.line_chart("title <&>", [line], box))
        assert page.named("svg")[0]["role"] == "img"
        assert page.text.startswith("title <&>")
        assert "nan" not in "".join(str(element) for element in page.elements)


def test_legend_names_only_named_series():
    lines = [svg.Line(name, np.zeros(1), np.zeros(1)) for name in ("a<b", "")]
    assert Page(svg.legend(lines)).text == "a<b"


def test_updates_are_counted_in_whole_numbers():
    line = svg.Line("", np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    page = Page(svg.line_chart("loss", [line], svg.frame((0, 2), (3, 4))))
    assert page.text == "loss" + "33.23.43.63.84" + "012" + "update"
