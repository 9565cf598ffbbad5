"""docs/benchmarks.md says what the files of results say."""

import json
import re

from benchmarks import page


def test_the_tables_of_the_page_are_those_of_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.missing(text) == [], "a table or picture stands in the page without its file"
    assert all(page.picture(name).exists() for name in page.names(text, "picture"))
    assert page.filled(text) == text, "run `python -m benchmarks.page`"
    assert len(page.MARKED.findall(text)) >= 4


def test_a_figure_on_the_page_is_the_one_measured():
    """One of them by hand, from the single runs rather than from the summary."""
    report = json.loads((page.RESULTS / "gpu-qwen3-4b.json").read_text())
    middle, ours = {}, "ours, cached"
    for name in ("mlx-lm", ours):  # a run that was cut short leaves others without a time
        times = sorted(time for run in report["runs"][name] for time in run["later_s"])
        middle[name] = times[len(times) // 2]
    line = next(x for x in page.table("gpu-qwen3-4b").splitlines() if x.startswith(f"| {ours} |"))
    assert f"{middle['mlx-lm'] / middle[ours]:.2f}" in line


def test_a_variant_whose_losses_differ_has_no_figure(tmp_path, monkeypatch):
    report = json.loads((page.RESULTS / "gpu-qwen3-4b.json").read_text())
    report["variants"]["mlx-lm, MLX as ours runs it"]["agrees"] = False
    (tmp_path / "x.json").write_text(json.dumps(report))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    line = next(x for x in page.table("x").splitlines() if "MLX as ours runs it" in x)
    assert not re.search(r"\d\.\d", line)
