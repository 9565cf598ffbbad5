"""The three-way comparison, worked out by hand for each case."""

import pytest

from stages.compose import applied

# before: conf/ when params.yaml came about; the experiment set the rate and the batch on top.
BEFORE = {
    "train.learning_rate": 1e-4,
    "train.seed": 0,
    "memory.batch_size": "auto",
    "run.device": "auto",
}
CURRENT = {**BEFORE, "train.learning_rate": 3e-4, "memory.batch_size": 2}


@pytest.mark.parametrize(
    ("edit", "carried", "lost"),
    [
        # nothing edited: all stays
        ({}, {"train.learning_rate": 3e-4, "memory.batch_size": 2}, {}),
        # another machine setting edited: all stays
        ({"run.device": "cpu"}, {"train.learning_rate": 3e-4, "memory.batch_size": 2}, {}),
        # the very machine setting edited: the edit counts, the mathematics stays
        ({"memory.batch_size": 8}, {"train.learning_rate": 3e-4}, {}),
        # mathematics edited: a person decides about the mathematics, the machine's value stays
        ({"train.seed": 1}, {"memory.batch_size": 2}, {"train.learning_rate": 3e-4}),
        # the very key edited to something else: that is the same question
        ({"train.learning_rate": 5e-4}, {"memory.batch_size": 2}, {"train.learning_rate": 3e-4}),
        # the very key edited to the experiment's value: nothing of it would be lost
        ({"train.learning_rate": 3e-4}, {"memory.batch_size": 2}, {}),
    ],
)
def test_what_stays_and_what_a_person_decides(edit, carried, lost):
    found = applied.compare(CURRENT, BEFORE, {**BEFORE, **edit})
    assert found == applied.Applied(carried=carried, lost=lost)


def test_without_an_experiment_an_edit_just_counts():
    found = applied.compare(BEFORE, BEFORE, {**BEFORE, "train.seed": 1})
    assert found == applied.Applied({}, {})


def test_a_key_that_the_schema_lost_or_gained_is_no_experiment():
    before = {**BEFORE, "train.old": 1}
    now = {**BEFORE, "train.new": 2}
    assert applied.compare(before, before, now) == applied.Applied({}, {})


def test_where_nothing_is_known_about_before_all_that_differs_is_listed():
    now = {**BEFORE, "train.seed": 1}
    found = applied.compare(CURRENT, {}, now)
    assert found.lost == {"train.learning_rate": 3e-4, "train.seed": 0}


def test_head_is_conf_as_committed(project):
    file = project / "conf/train/lora.yaml"
    file.write_text(file.read_text().replace("learning_rate: 1e-4", "learning_rate: 9e-1"))
    assert applied.head(project)["train.learning_rate"] == 1e-4


def test_head_of_a_folder_without_a_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert applied.head(tmp_path) is None


def test_head_that_this_schema_cannot_compose_holds_nothing(project):
    from tests.compose.conftest import commit

    file = project / "conf/train/lora.yaml"
    file.write_text(file.read_text() + "an_old_key: 1\n")
    commit(project)
    assert applied.head(project) == {}
