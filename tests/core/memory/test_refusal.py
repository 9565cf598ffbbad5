"""A refusal on the paper machine: the budget it asks for is enough, and no reason is made up."""

import re

import machines
import pytest
from machines import CPU, MANIFEST, PaperSurveyor, examples, settings

from stages.core.errors import UserError
from stages.core.memory import choose

LENGTHS = [50, 100, 200, 400, 900] * 8


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Choose under a budget in GB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choose, "Surveyor", PaperSurveyor)

    def under(gb, **memory):
        given = settings(budget_gb=gb, **memory)
        return choose.choose(given, MANIFEST, examples(LENGTHS), examples([100]), CPU)

    return under


def refused(chosen, gb, **memory):
    """(text of the refusal, budget it asks for)."""
    with pytest.raises(UserError) as caught:
        chosen(gb, **memory)
    text = str(caught.value)
    return text, float(re.search(r"raise memory\.budget_gb to ([\d.]+)", text)[1])


@pytest.mark.parametrize("held_back", [0.7, 0.8, 0.95])
def test_the_budget_that_is_asked_for_is_enough(chosen, monkeypatch, held_back):
    """Also where MLX held back takes more than was predicted for it."""
    monkeypatch.setattr(machines, "HELD_BACK", held_back)
    text, enough = refused(chosen, 0.5, activation_cache="off")
    assert "died" not in text
    assert enough > 0.5
    assert chosen(enough, activation_cache="off").plan


def test_a_cache_that_is_fixed_counts(chosen):
    """3 GB of cache beside any step is more than 2 GB; no step died."""
    text, enough = refused(chosen, 2, cache_limit_gb=3)
    assert "died" not in text
    assert 3 < enough < 4
    assert chosen(enough, cache_limit_gb=3).plan.cache_limit_gb == 3
