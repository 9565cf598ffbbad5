"""Every command of one figure on a tiny model, and the table that the page makes of its file."""

import subprocess
import sys

import pytest

from benchmarks import machine, tables
from stages.core import files


def taken(tmp_path, module):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--out", str(tmp_path)],
        cwd=machine.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = files.read_json(tmp_path / f"{module}.json")
    assert report["machine"]["versions"]["mlx"]
    assert str(machine.REPOSITORY) not in str(report)
    return report, tables.of(report)


@pytest.mark.slow
def test_gradients_of_every_way_are_equal(tmp_path):
    report, text = taken(tmp_path, "gradients")
    assert len(report["cells"]) == 2 * 2 * 6
    assert all(cell["agrees"] for cell in report["cells"])
    assert text.count("×") >= 4
    assert "no figure" not in text


@pytest.mark.slow
def test_parts_of_an_update_are_less_than_it_on_both_sides(tmp_path):
    report, text = taken(tmp_path, "profile")
    losses = [side["loss"] for side in report["sides"].values()]
    assert max(losses) - min(losses) <= 1e-4 * losses[0]
    for name, side in report["sides"].items():
        parts = {one["part"]: one for one in side["parts"]}
        whole = parts.pop("the whole update")["seconds"]
        assert sum(x["seconds"] for x in parts.values()) == pytest.approx(whole)
        assert (parts["frozen layers"]["seconds"] == 0) == ("cached" in name)
        assert f"| {name} |" in text
    work = {name: {x["part"]: x["tflop"] for x in side["parts"]}
            for name, side in report["sides"].items()}  # fmt: skip
    assert work["mlx-lm"]["head and loss"] > work["ours, equal rows"]["head and loss"]


@pytest.mark.slow
def test_both_sides_learn_from_the_same_start(tmp_path):
    report, text = taken(tmp_path, "reach")
    theirs, ours = (report["sides"][name]["curve"] for name in ("mlx-lm", "ours"))
    assert theirs[0]["loss"] == pytest.approx(ours[0]["loss"], rel=1e-6)
    assert len(ours) > len(theirs) > 2
    for curve in (theirs, ours):
        assert curve[-1]["loss"] < curve[0]["loss"]
        seconds = [point["seconds"] for point in curve]
        assert seconds == sorted(seconds)
    assert "validation rows" in text


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path):
    report, text = taken(tmp_path, "resume")
    assert report["same_bits"]
    assert len(report["undisturbed"]["updates_s"]) >= 10
    assert all(x["killed_after"] >= 3 for x in report["killed"])
    assert report["medians"]["to_first_update_s"] > report["medians"]["update_s"]
    assert "the same bits" in text
