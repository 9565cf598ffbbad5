"""The page of a sweep: places worked out by hand, and nothing from outside the file."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest

from stages.commands.sweeping import page, results
from stages.commands.sweeping.axis import axis
from stages.commands.sweeping.points import Sweep
from tests.report.parsing import Page

HOSTILE = "</p><script>alert(1)</script>"


def table(rows):
    """(rate, kind, loss or None) as results.collect gives them."""
    made = []
    for i, (rate, kind, loss) in enumerate(rows, start=1):
        done = loss is not None
        numbers = dict.fromkeys(results.NUMBERS, math.nan)
        if done:
            numbers |= {"tuned_loss": loss, "loss_change": loss - 4, "peak_gb": 1.25}
            numbers |= {"loss_change_low": loss - 4.1, "loss_change_high": loss - 3.9}
        made.append(
            {
                "point": i,
                "experiment": f"point-{i}",
                "state": "done" if done else "failed",
                "train.learning_rate": rate,
                "train.fine_tune_type": kind,
                "train.updates": 60,
                **numbers,
                "commit": "abc" if done else "",
                "reason": "" if done else HOSTILE,
            }
        )
    return pd.DataFrame(made)


ROWS = [(1e-4, "lora", 2.5), (1e-3, "lora", 2.25), (1e-2, "dora", 3.0), (1.0, "dora", None)]


def built(rows=ROWS):
    sweep = Sweep("rates", Path("/p"), Path("/p/x"), (), code={"a": "b"})
    return page.build(sweep, table(rows))


def test_a_range_of_rates_is_logarithmic():
    found = axis("rate", pd.Series([1e-4, 1e-3, 1e-2, None]))
    assert found.kind == "log"
    assert found.places[:3] == pytest.approx([0, 0.5, 1])
    assert math.isnan(found.places[3])
    assert [text for _, text in found.marks] == ["1e-4", "0.001", "0.01"]


def test_layers_are_linear_and_minus_one_is_a_number():
    found = axis("layers", pd.Series([4, 9, -1]))
    assert found.kind == "linear"
    assert found.places == pytest.approx([0.5, 1, 0])


def test_words_stand_side_by_side_in_their_order():
    found = axis("kind", pd.Series(["lora", "dora", "lora", "full"]))
    assert (found.kind, found.places) == ("each", pytest.approx([1 / 6, 0.5, 1 / 6, 5 / 6]))


def test_many_values_get_round_marks():
    found = axis("rate", pd.Series([10.0 ** (-k / 3) for k in range(12)]))
    assert [text for _, text in found.marks] == ["0.001", "0.01", "0.1", "1"]


def test_one_value_stands_in_the_middle():
    assert axis("x", pd.Series([3, 3])).places == [0.5, 0.5]


def test_the_best_point_is_named_and_ranked_first():
    found = Page(built())
    assert (
        "lowest loss is 2.2500 nats, at learning_rate = 0.001, fine_tune_type = lora" in found.text
    )
    assert "the highest is 0.7500 above it" in found.text
    board = found.sections["leaderboard"]
    assert board.index("point-2") < board.index("point-1") < board.index("point-3")
    assert "−1.7500" in board
    assert "point-4" not in board
    assert "sweep --apply point-2" in found.sections["take"]


def test_each_point_has_a_line_and_a_dot_per_key():
    source = built()
    for i, loss in ((1, "2.5000"), (2, "2.2500"), (3, "3.0000")):
        assert source.count(f"<title>point-{i}: {loss}</title>") == 3  # a line, two dots
    assert source.count('class="line" style="stroke:color-mix') == 3
    drawn = re.findall(r"<title>point-(\d): [\d.]+</title></path>", source)
    assert drawn == ["3", "1", "2"]  # the best on top


def test_key_with_one_value_is_a_fact_and_no_picture():
    found = Page(built())
    assert "train.updates" in found.sections["take"]
    assert "train.updates" not in found.sections["keys"]


def test_nothing_comes_from_outside_and_text_stays_text():
    found = Page(built())
    names = {name for name, _ in found.elements}
    assert not names & {"script", "link", "iframe", "img", "object", "form", "base"}
    for _, attributes in found.elements:
        assert attributes.get("href", "#").startswith("#")
        assert "src" not in attributes
    assert not re.search(r"url\(|@import|https?:", found.style)
    assert HOSTILE in found.sections["rest"]


@pytest.mark.parametrize("rows", [ROWS[3:], ROWS[:1]])
def test_few_points_are_a_page_too(rows):
    found = Page(built(rows))
    assert "It takes two finished points" in found.sections["coordinates"]
    assert list(found.sections)[:3] == ["leaderboard", "coordinates", "keys"]
