"""Choices on a machine on paper: the fastest that fits, what is fixed stands, refusals count."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from machines import CPU, MANIFEST, REST, UPDATES, PaperSurveyor, examples, peak, settings

from stages.core.errors import UserError
from stages.core.memory import candidates, chart, choose, table
from stages.core.memory.budget import Budget
from stages.core.memory.choose import choose as chosen_plan
from stages.core.memory.fit import Shape
from stages.core.memory.words import size

LENGTHS = np.random.default_rng(1).integers(30, 512, size=200)
LENGTHS[:3] = 512


@pytest.fixture
def paper(monkeypatch, tmp_path):
    """Answers by formula; `paper.surveyor` is the last one made."""
    monkeypatch.chdir(tmp_path)

    class Paper:
        options = {}
        surveyor = None

        def __call__(self, *args):
            self.surveyor = PaperSurveyor(*args, **self.options)
            return self.surveyor

        def choose(self, gb, lengths=LENGTHS, whole_table=False, **memory):
            given = settings(budget_gb=gb, **memory)
            train, valid = examples(lengths), examples([100, 90])
            return chosen_plan(given, MANIFEST, train, valid, CPU, whole_table=whole_table)

    made = Paper()
    monkeypatch.setattr(choose, "Surveyor", made)
    return made


def true_peak(choice):
    """What the run would really need on the paper machine."""
    plan = choice.plan
    load = choice.case.work.load(plan)
    way = choice.chosen.way
    steps = [peak(way, shape, plan.loss_chunk) for shape in load.shapes]
    return REST.resting(way.cached) + max(steps)


def test_with_much_memory_nothing_is_recomputed(paper):
    choice = paper.choose(100)
    assert choice.plan.recompute == 0
    assert choice.plan.predicted_peak_gb == pytest.approx(true_peak(choice) / 1e9, rel=0.02)
    assert choice.measured_worst == pytest.approx(true_peak(choice), rel=0.02)
    kinds = {point.kind for point in paper.surveyor.readings}
    assert kinds == {"check", "frozen", "attention", "update", "head", "layers", "whole"}
    ways = {p.way.recompute for p in paper.surveyor.readings if p.kind == "layers"}
    assert ways == {0}, "what is not needed is not measured"


@pytest.mark.parametrize("gb", [0.8, 0.65, 0.6])
def test_every_budget_is_kept(paper, gb):
    choice = paper.choose(gb)
    assert true_peak(choice) + choice.plan.cache_limit_gb * 1e9 <= gb * 1e9
    assert choice.chosen.start <= gb * 1e9


def test_less_memory_is_never_faster(paper):
    budgets = (100, 1, 0.7, 0.65, 0.6)
    seconds = [paper.choose(gb).chosen.total_seconds(UPDATES) for gb in budgets]
    assert all(a <= b * choose.SAME_SPEED for a, b in itertools.pairwise(seconds))
    assert seconds[0] < seconds[-1]


def test_the_choice_is_the_best_of_all_that_fit(paper):
    choice = paper.choose(0.7)
    fitting = [found for found in choice.all if found.bytes <= 0.7e9]
    least = min(found.total_seconds(UPDATES) for found in fitting)
    assert choice.chosen.total_seconds(UPDATES) <= choose.SAME_SPEED * least


@pytest.mark.parametrize(
    ("memory", "field", "value"),
    [
        ({"batch_size": 3}, "batch_size", 3),
        ({"grad_accumulation_steps": 4}, "batch_size", 2),
        ({"grad_checkpoint": True}, "recompute", 1),
        ({"grad_checkpoint": 2}, "recompute", 2),
        ({"grad_checkpoint": False}, "recompute", 0),
        ({"loss_chunk": 48}, "loss_chunk", 48),
        ({"loss_chunk": "off"}, "loss_chunk", 0),
        ({"attention_block": 96}, "attention_block", 96),
        ({"attention_block": "off"}, "attention_block", 0),
        ({"activation_cache": "on"}, "activation_cache", True),
        ({"activation_cache": "off"}, "activation_cache", False),
        ({"cache_limit_gb": 0.25}, "cache_limit_gb", 0.25),
    ],
)
def test_what_is_fixed_stands(paper, memory, field, value):
    choice = paper.choose(4, **memory)
    assert getattr(choice.plan, field) == value
    assert choice.plan.predicted_peak_gb == pytest.approx(true_peak(choice) / 1e9, rel=0.03)


def test_a_refusal_has_the_numbers(paper):
    with pytest.raises(UserError) as caught:
        paper.choose(0.5, activation_cache="off")
    text = str(caught.value)
    needed = float(caught.value.expected.split()[2])
    assert needed > 0.5
    assert f"{needed:.2f} GB, {needed - 0.5:.2f} GB more" in text
    for word in (
        "split.max_seq_length=",
        "% of the targets",
        "train.num_layers=4",
        "4-bit",
        "rank=4",
    ):
        assert word in text
    assert paper.choose(needed + 0.01, activation_cache="off").plan


@pytest.mark.parametrize(
    ("count", "text"), [(3_400_000, "3.4 MB"), (-9_000_000, "-9.0 MB"), (12_000_000, "0.01 GB")]
)
def test_sizes_that_are_nothing_in_gb_are_told_in_mb(count, text):
    assert size(count) == text


def test_a_little_that_is_missing_is_told_in_mb(paper):
    """The budget that a refusal names holds the plan; 4 MB less does not, and the text says so."""
    with pytest.raises(UserError) as caught:
        paper.choose(0.35, activation_cache="on")
    enough = float(caught.value.fix.split("memory.budget_gb to ")[1].split(",")[0])
    assert paper.choose(enough, activation_cache="on").plan
    with pytest.raises(UserError) as caught:
        paper.choose(enough - 0.004, activation_cache="on")
    assert "MB more" in caught.value.found
    assert "0.00 GB" not in str(caught.value)


def test_little_room_beside_the_weights_shortens_the_check(paper, monkeypatch):
    """With a check of 1 MB a token of the padded length: 128 tokens do not fit, 64 do."""
    choice = paper.choose(4, activation_cache="off")
    monkeypatch.setattr(choice.model, "check_peak", lambda tokens: 1e6 * tokens)
    found = candidates.predict(choice.chosen.plan, choice.model, choice.case.work.load(choice.plan))
    assert found.plan.check_tokens == 128
    for room, wanted in ((200, 128), (110, 64), (1, 32)):
        limit = Budget(REST.whole + room * 1_000_000, "on paper")
        case = replace(choice.case, limit=limit)
        short = candidates.checked_within(found, choice.model, case)
        assert short.plan.check_tokens == wanted
        length = LENGTHS[np.abs(LENGTHS - wanted).argmin()]
        padded = min(width for width in found.plan.widths if width >= length)
        assert short.start == REST.whole + 1e6 * padded


def test_what_is_needed_before_the_first_update_is_said(paper):
    with pytest.raises(UserError) as caught:
        paper.choose(0.5, activation_cache="on")
    assert "before the first update" in caught.value.found
    assert "4-bit" in caught.value.fix
    assert "split.max_seq_length" not in caught.value.fix, "a shorter cap frees no weights"


def test_the_change_that_helps_most_comes_first(paper):
    with pytest.raises(UserError) as caught:
        paper.choose(0.5, activation_cache="off")
    lines = caught.value.fix.splitlines()[1:]
    saved = [float(line.split("saves about ")[1].split()[0]) for line in lines if "GB" in line]
    assert len(saved) >= 2
    assert saved == sorted(saved, reverse=True)


def test_another_budget_is_another_choice_from_the_same_measurements(paper, monkeypatch):
    first = paper.choose(100, whole_table=True)
    known = paper.surveyor
    monkeypatch.setattr(choose, "Surveyor", lambda *_args: known)
    before = known.measured
    second = paper.choose(0.6, whole_table=True)
    asked = list(known.readings)[before:]
    assert {point.kind for point in asked} <= {"whole"}, "only worst micro-batches are run"
    assert second.plan != first.plan
    assert second.plan.predicted_peak_gb <= 0.6 < first.plan.predicted_peak_gb


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        ({"batch_size": 1}, "memory.batch_size=1 is fixed"),
        ({"grad_checkpoint": True}, "memory.grad_checkpoint=true is fixed"),
        ({"loss_chunk": "off"}, "memory.loss_chunk=off is fixed"),
    ],
)
def test_what_fixed_settings_cost_is_said(paper, memory, text):
    free = paper.choose(4, whole_table=True)
    choice = paper.choose(4, whole_table=True, **memory)
    line = next(note for note in choice.notes if text in note)
    assert not any("is fixed" in note for note in free.notes)
    slower = (choice.chosen.total_seconds(UPDATES) - free.chosen.total_seconds(UPDATES)) / UPDATES
    if slower > 0.01 * free.chosen.seconds:
        assert f"{slower:.2f} s an update slower" in line
    more = choice.chosen.step - free.chosen.step
    if more > 0.01 * free.chosen.step:
        assert f"{size(more)} more" in line


def test_a_fixed_value_that_auto_would_choose_costs_nothing(paper):
    free = paper.choose(4, whole_table=True)
    same = paper.choose(4, whole_table=True, loss_chunk=free.plan.loss_chunk)
    assert any("no dearer than auto" in note for note in same.notes)


def test_below_all_other_plans_mlx_may_not_run_ahead(paper):
    ample = paper.choose(2, whole_table=True, activation_cache="off").all
    assert all(found.plan.memory_limit_gb is None for found in ample)
    smallest = min(ample, key=lambda found: found.bytes)
    rest = smallest.step - smallest.transient
    choice = paper.choose((rest + 0.9 * smallest.transient) / 1e9, activation_cache="off")
    assert choice.plan.memory_limit_gb < choice.budget.gb
    assert choice.measured_worst <= choice.budget.bytes
    assert choice.chosen.seconds > smallest.seconds
    with pytest.raises(UserError, match="No plan fits"):
        paper.choose((rest + 0.65 * smallest.transient) / 1e9, activation_cache="off")


def test_the_share_of_targets_beyond_a_shorter_cap_is_counted(paper):
    lengths = [100] * 90 + [512] * 10
    with pytest.raises(UserError) as caught:
        paper.choose(0.5, lengths=np.array(lengths), activation_cache="off")
    line = next(x for x in str(caught.value).splitlines() if "split.max_seq_length=" in x)
    cap = int(line.split("split.max_seq_length=")[1].split(",")[0])
    share = sum(min(n - 10, max(0, n - cap)) for n in lengths) / sum(n - 10 for n in lengths)
    assert f"{share:.1%}" in line


def test_a_way_whose_worst_micro_batch_dies_is_not_chosen(paper):
    assert paper.choose(4).plan.recompute == 0
    paper.options = {
        "dies": lambda p: "SIGKILL" if p.kind == "whole" and p.way.recompute == 0 else ""
    }
    choice = paper.choose(4, attention_block="off")
    assert choice.plan.recompute > 0
    assert choice.measured_worst is not None


def test_where_activations_cannot_be_stored_the_whole_model_is_measured(paper):
    paper.options = {"off": True}
    choice = paper.choose(4)
    assert not choice.plan.activation_cache
    assert not any(x.way.cached for x in choice.all)


def test_where_nothing_can_be_measured_the_rule_decides(paper):
    paper.options = {"dies": lambda point: "ValueError: no"}
    choice = paper.choose(4)
    assert choice.chosen is None
    assert choice.plan.batch_tokens == 2048
    assert "could be measured" in choice.notes[0]


def test_small_models_get_the_rules_plan(paper):
    small = replace(MANIFEST, bytes=1_000_000)
    train, valid = examples(LENGTHS), examples([100])
    choice = chosen_plan(settings(), small, train, valid, CPU)
    assert paper.surveyor is None
    assert choice.chosen is None
    assert "nothing measured" in choice.line()


def test_workers_on_one_machine_share_its_memory(monkeypatch):
    given = settings()
    alone = choose.machine_budget(given, CPU).bytes
    given.run.launch.hosts = 2
    assert choose.machine_budget(given, CPU).bytes == pytest.approx(alone / 2, rel=0.1)


def test_rows_of_the_table_differ_by_one_setting(paper):
    choice = paper.choose(0.8, whole_table=True)
    rows = {row.name: row for row in table.rows(choice)}
    base = next(row for name, row in rows.items() if name.startswith("loss in pieces"))
    assert base.saves_gb == base.costs_seconds == 0
    assert rows["plain"].saves_gb < 0
    assert rows["recompute all layers"].saves_gb > rows["recompute 1 layer in 2"].saves_gb > 0
    assert rows["recompute the first half"].saves_gb > rows["recompute the last half"].saves_gb
    assert rows["recompute all layers"].costs_seconds > 0
    assert rows["frozen layers stored"].saves_gb == pytest.approx(0.31)
    assert rows["attention blocks of 64"].saves_gb > 0
    assert rows["chosen"].chosen
    assert rows["chosen"].peak_gb == pytest.approx(choice.plan.predicted_peak_gb)


def test_the_record_is_json_and_says_what_fits(paper):
    choice = paper.choose(0.8)
    record = json.loads(json.dumps(table.record(choice)))
    longest = record["longest_that_fits"]
    way, chunk = choice.chosen.way, choice.plan.loss_chunk
    need = lambda n: REST.resting(way.cached) + peak(way, Shape(1, n, n), chunk)
    assert need(longest) <= 0.82e9
    assert need(longest * 1.1) > 0.78e9
    assert record["plan"]["batch_size"] == choice.plan.batch_size


def test_the_chart_shows_the_budget(paper, tmp_path):
    choice = paper.choose(0.8, whole_table=True)
    chart.draw(choice, tmp_path / "peak.svg")
    text = (tmp_path / "peak.svg").read_text()
    assert "<svg" in text
    curves = table.curves(choice, [100, 200, 400])
    assert any(name.startswith("chosen") for name in curves)
    assert all(values == sorted(values) for values in curves.values())


def test_places_to_recompute_are_tried():
    assert (2, "first") in candidates.recomputing(None)
    assert candidates.recomputing(4) == [(4, "spread")]
