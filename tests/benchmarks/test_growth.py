"""Laws of growth, axes made of figures, and what the page shows of them."""

import json

import numpy as np
import pytest

from benchmarks import axes, fits, page, pictures, tables


def report(value, mlx_lm, ours, agrees=True, layers=8, rows=4, cap=384):
    """A file of results with two variants: (seconds of a later pass, MB, micro-batches)."""

    def variant(found, agrees):
        seconds, above, micro_batches = found
        return {
            "agrees": agrees,
            "later_s": {"median": seconds},
            "first_s": {"median": 2 * seconds},
            "above_mb": {"median": above},
            "micro_batches": micro_batches,
            "padding_share": 0.25,
            "spec": {"layers": layers, "rows": rows, "cap": cap},
            "device": {"name": "A processor", "kind": "cpu"},
        }

    machine = {"time": f"2026-01-0{value} 00:00 UTC", "load": 0.5, "cores": 2, "processor": "x"}
    return {
        "name": f"figure-{value}",
        "baseline": "mlx-lm",
        "repeats": 1,
        "machine": machine | {"versions": {"mlx": "1", "mlx-lm": "2"}},
        "variants": {"mlx-lm": variant(mlx_lm, True), "ours": variant(ours, agrees)},
    }


def test_a_fit_gives_back_a_known_law():
    x = [256, 512, 1024, 2048, 4096]
    line = fits.fit(x, [0.5 + 0.002 * v for v in x])
    assert (line.c, line.a, line.b) == (pytest.approx(0.5), pytest.approx(0.002), 0.0)
    assert line.residual < 1e-9
    assert line.spare == 3
    square = fits.fit(x, [0.3 + 0.001 * v + 4e-6 * v * v for v in x], square=True)
    assert square.c == pytest.approx(0.3)
    assert square.a == pytest.approx(0.001)
    assert square.b == pytest.approx(4e-6)
    assert square(1000) == pytest.approx(5.3)
    assert fits.fit(x, [2.0 * v for v in x], square=True).a == pytest.approx(2.0)


def test_a_fit_says_how_far_points_are_from_it():
    x = np.array([1, 2, 4, 8])
    y = 1.0 + x
    y[1] *= 1.2
    found = fits.fit(x, y)
    assert 0.05 < found.residual < 0.2
    assert found.residual == pytest.approx(np.abs(found(x) / y - 1).max())


def test_no_law_where_there_are_too_few_points_and_no_square_without_a_spare_one():
    assert fits.fit([4, 4], [1.0, 1.1]) is None
    assert fits.fit([1, 2], [1.0, 0.0]) is None
    assert fits.fit([1, 2, 3], [1.0, 4.0, 9.0], square=True).b == 0.0
    assert fits.fit([1, 2, 3, 4], [1.0, 4.0, 9.0, 16.0], square=True).b == pytest.approx(1.0)
    # A cost that grows ever slower is no parabola that would fall later.
    assert fits.fit([1, 2, 3, 4], [1.0, 1.5, 1.8, 2.0], square=True).b == 0.0


def test_a_law_in_words():
    law = fits.Fit(c=-0.25, a=0.5, b=2e-6, residual=0.034, spare=1)
    assert law.told("s") == "−0.25 + 0.5·x + 2.00e-6·x² s, within 3%"


def test_an_axis_has_the_points_of_its_figures_in_order_and_leaves_wrong_ones_out():
    reports = [
        report(1, (40, 3000, 4), (20, 1000, 4), layers=8),
        report(2, (30, 2000, 4), (15, 600, 4), layers=4),
        report(3, (84, 8500, 4), (42, 2800, 4), layers=-1),
        report(4, (56, 5000, 4), (1, 1, 4), agrees=False, layers=16),
    ]
    found = axes.summary("layers", reports)
    points = {name: [p["x"] for p in x["points"]] for name, x in found["series"].items()}
    assert points == {"mlx-lm": [4, 8, 16, 30], "ours": [4, 8, 30]}
    law = found["series"]["mlx-lm"]["laws"]["seconds"]
    # 20 s and 2.5 s more a layer at 4 and 8, over four micro-batches.
    assert law["a"] == pytest.approx(2.1 / 4, rel=0.05)
    assert found["machine"]["time"].startswith("2026-01-01")
    text = tables.of(found)
    line = next(x for x in text.splitlines() if x.startswith("| 16 "))
    assert line == "| 16 | 56.00 s, 5.00 GB |  |"
    assert "No figure, its losses are not mlx-lm's: ours in figure-4." in text
    assert "| 8 | 40.00 s, 3.00 GB | 20.00 s, 1.00 GB (2.00 ×, 33%) |" in text


def test_rows_of_an_axis_are_those_that_micro_batches_had():
    """Asked for 16 rows of 16 examples, ours took four micro-batches: four rows each."""
    reports = [
        report(1, (16, 100, 16), (8, 50, 16), rows=1),
        report(2, (12, 1000, 1), (6, 200, 4), rows=16),
    ]
    found = axes.summary("rows", reports)
    assert [p["x"] for p in found["series"]["mlx-lm"]["points"]] == [1, 16]
    assert [p["x"] for p in found["series"]["ours"]["points"]] == [1, 4]
    assert [p["seconds"] for p in found["series"]["ours"]["points"]] == [0.5, 1.5]
    assert "| 16 | 12.00 s, 1.00 GB | 6.00 s, 0.20 GB (2.00 ×, 20%) |" in tables.of(found)


def test_a_picture_is_the_same_for_the_same_numbers(tmp_path):
    found = axes.summary(
        "lengths",
        [report(1 + i, (v, v, 2), (v / 2, v / 3, 2), cap=v) for i, v in enumerate((128, 256, 512))],
    )
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pictures.draw(found, tmp_path / name / "axis-lengths.svg")
    first, second = ((tmp_path / name / "axis-lengths.svg").read_bytes() for name in ("a", "b"))
    assert first == second
    assert b"<svg" in first
    assert b"tokens of each example" in first
    assert len(first) < 60_000


def test_a_table_whose_file_is_missing_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    text = "".join(
        f"<!-- table: {name} -->\nas before\n<!-- end -->\n" for name in ("there", "gone")
    )
    (tmp_path / "there.json").write_text(json.dumps(axes.summary("rows", [
        report(1, (1, 2, 3), (1, 2, 3), rows=1)])))  # fmt: skip
    assert page.missing(text) == ["gone"]
    made = page.filled(text)
    assert made.count("as before") == 1
    assert "rows of a micro-batch" in made


def test_a_way_with_another_gradient_has_no_figure():
    cell = {"rows": 1, "length": 8, "seconds": 0.51, "peak_gb": 0.25, "loss_error": 0.0}
    good = {**cell, "way": "all kept", "gradient_error": 0.0, "agrees": True}
    bad = {**cell, "way": "all again", "gradient_error": 0.1, "agrees": False}
    machine = report(1, (1, 1, 1), (1, 1, 1))["machine"]
    text = tables.of({"kind": "gradients", "machine": machine, "lengths": [8], "rows": [1],
                      "ways": ["all kept", "all again"], "cells": [good, bad]})  # fmt: skip
    assert "| 1 × 8 | 0.51 s, 0.25 GB | no figure: another gradient |" in text


@pytest.mark.parametrize(("apart", "shown"), [(2e-6, True), (2e-4, False), (float("nan"), False)])
def test_a_sweep_has_a_figure_only_where_adapters_are_the_same(apart, shown):
    found = {
        "machine": report(1, (1, 1, 1), (1, 1, 1))["machine"],
        "examples": 16,
        "passes": 3,
        "mlx_lm_s": [99.0, 101.0],
        "points": [{"seconds": 40.0}, {"seconds": 20.0}],
        "ours_s": 60.0,
        "eight_of_mlx_lm_s": 200.0,
        "one_without_cache_s": 50.0,
        "change_apart": apart,
        "times_faster": 200 / 60,
    }
    assert ("3.33" in tables.of(found)) is shown
