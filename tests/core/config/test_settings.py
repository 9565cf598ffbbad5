"""Settings: what is merged, what is refused, and what the refusal says."""

import pytest

from stages.core.config import checks, schema, settings
from stages.core.errors import UserError

GOOD = """
model: {repo: 'builtin:tiny'}
train: {updates: 10, learning_rate: 1e-5}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(GOOD)
    return tmp_path


def refused(**edits):
    """The problems after setting dotted keys (double underscore for a dot) on good settings."""
    good = schema.Settings()
    good.model.repo = "builtin:tiny"
    good.train.updates = 10
    for key, value in edits.items():
        *groups, name = key.split("__")
        target = good
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, value)
    return checks.problems(good)


def test_a_rate_written_as_1e_5_is_a_number(project):
    assert settings.load_settings().train.learning_rate == 0.00001


def test_the_command_line_beats_local_yaml_beats_params(project):
    (project / "local.yaml").write_text("memory: {budget_gb: 8, batch_size: 2}\n")
    merged = settings.load_settings(overrides=["memory.budget_gb=24"])
    assert (merged.memory.budget_gb, merged.memory.batch_size) == (24, 2)


def test_a_temporary_workspace_reads_local_yaml_of_the_dvc_root(project, monkeypatch):
    (project / "local.yaml").write_text("memory: {budget_gb: 8}\n")
    workspace = project / ".dvc" / "tmp" / "exps" / "tmpabc"
    workspace.mkdir(parents=True)
    (workspace / "params.yaml").write_text(GOOD)
    monkeypatch.chdir(workspace)
    for named in (str(project), "/nonexistent/other"):  # a stale DVC_ROOT does not count
        monkeypatch.setenv("DVC_ROOT", named)
        assert settings.load_settings().memory.budget_gb == 8


@pytest.mark.parametrize("word", ["train.learning_rate=1", "model.dtype=float32"])
def test_mathematics_on_a_stages_command_line_is_refused(project, word):
    with pytest.raises(UserError, match=r"memory\.\* and run\.\* only"):
        settings.load_settings(overrides=[word])


def test_mathematics_in_local_yaml_is_refused(project):
    (project / "local.yaml").write_text("train: {learning_rate: 1}\n")
    with pytest.raises(UserError, match=r"local\.yaml may set"):
        settings.load_settings()


@pytest.mark.parametrize(
    ("yaml", "close"),
    [
        ("train: {learningrate: 1}", "train.learning_rate"),
        ("train: {lora_parameters: {alpha: 1}}", ""),
        ("trian: {updates: 1}", "train"),
        ("memory: {batchsize: 1}", "memory.batch_size"),
    ],
)
def test_d8_a_misspelt_key_is_refused_and_the_nearest_named(project, yaml, close):
    (project / "params.yaml").write_text(yaml)
    with pytest.raises(UserError, match="Unknown setting") as caught:
        settings.load_settings()
    assert caught.value.fix.endswith(close)


def test_a_wrong_type_is_refused_with_its_key(project):
    (project / "params.yaml").write_text("train: {learning_rate: abc}")
    with pytest.raises(UserError, match="wrong type") as caught:
        settings.load_settings()
    assert "train.learning_rate" in caught.value.where


def test_a_key_without_a_value_is_named(project):
    (project / "params.yaml").write_text(GOOD.replace("1e-5", "'???'"))
    with pytest.raises(UserError, match="no value") as caught:
        settings.load_settings()
    assert caught.value.found == "train.learning_rate=???"


def test_a_value_out_of_range_is_told_where_it_stands(project):
    (project / "local.yaml").write_text("memory: {batch_size: 0}\nrun: {keep_last: 5}\n")
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    assert caught.value.where == "memory.batch_size (local.yaml)"
    assert caught.value.fix == "edit local.yaml and run again"
    with pytest.raises(UserError) as caught:
        settings.load_settings(overrides=["memory.batch_size=-1", "run.launch.hosts=[]"])
    assert caught.value.where == (
        "memory.batch_size (the command line), run.launch.hosts (the command line)"
    )
    assert caught.value.fix == "edit the command line and run again"
    (project / "params.yaml").write_text(GOOD.replace("1e-5", "-1"))
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    assert caught.value.where == "train.learning_rate, memory.batch_size (local.yaml)"
    assert caught.value.fix == "edit conf/ and local.yaml and run again"
    (project / "local.yaml").unlink()
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    assert (caught.value.where, caught.value.fix) == (
        "train.learning_rate",
        "edit conf/ and run again",
    )


def test_a_marker_in_local_yaml_is_told_of_there(project):
    (project / "local.yaml").write_text("memory:\n  batch_size: ???\n")
    with pytest.raises(UserError, match="no value") as caught:
        settings.load_settings()
    assert caught.value.fix == "give them one in local.yaml"


def test_no_params_and_no_yaml_are_told_apart(project):
    (project / "params.yaml").write_text("a: [1")
    with pytest.raises(UserError, match="is not YAML"):
        settings.load_settings()
    (project / "params.yaml").write_text("a: 1\nb: 2\n\tc: 3\n")
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    assert caught.value.where.endswith("params.yaml:3:1")
    assert "no tabs" in caught.value.fix
    (project / "params.yaml").write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    assert caught.value.where.endswith("params.yaml:3:1")
    assert caught.value.found == "found duplicate key a"
    (project / "params.yaml").unlink()
    with pytest.raises(UserError, match=r"no params\.yaml"):
        settings.load_settings()


def test_all_values_out_of_range_are_listed_at_once(project):
    (project / "params.yaml").write_text(
        "model: {repo: 'builtin:tiny'}\ntrain: {updates: 0, learning_rate: -1, num_layers: 0}"
    )
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    for key in ("train.updates", "train.learning_rate", "train.num_layers"):
        assert key in caught.value.where


def test_g3_accumulation_below_one_is_refused_as_mlx_lm_words_it():
    (problem,) = refused(memory__grad_accumulation_steps=0)
    assert problem.message == "grad_accumulation_steps must be at least 1"


def test_g3_both_fixed_must_make_the_effective_batch():
    (problem,) = refused(memory__batch_size=4, memory__grad_accumulation_steps=3)
    assert "4 × 3 = 12" in problem.found
    assert problem.expected == "effective_batch_size=8"
    assert not refused(memory__batch_size=4, memory__grad_accumulation_steps=2)
    assert not refused(
        memory__batch_size=2, memory__grad_accumulation_steps=2, run__launch__hosts=2
    )


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("memory__grad_checkpoint", "yes", 2),
        ("memory__grad_checkpoint", 0, True),
        ("memory__loss_chunk", 0, "off"),
        ("memory__budget_gb", -1, 0.5),
        ("memory__budget_gb", float("nan"), "auto"),
        ("memory__cache_limit_gb", "none", 0),
        ("memory__batch_size", 1.5, 1),
        ("memory__activation_cache", "maybe", "on"),
        ("train__clip_norm", 0, 1.0),
        ("train__lora_parameters__scale", float("nan"), 1.0),
        ("train__lora_parameters__scale", 0, 20.0),
        ("train__epochs", 2.0, None),  # beside train.updates
        ("train__learning_rate", float("inf"), 0),
        ("split__overlap", 1023, 1022),
        ("model__repo", "org/name", "wheel:x"),  # a Hub id needs a revision
        ("model__path", "x", None),  # beside model.repo
    ],
)
def test_single_values(key, bad, good):
    assert [problem.key.replace(".", "__") for problem in refused(**{key: bad})] in (
        [key],
        ["train__updates"],
        ["model__revision"],
        ["model__repo"],
    )
    assert not refused(**{key: good})


@pytest.mark.parametrize(
    "bad",
    [0, -1, True, 1.5, [], "", "one,two", [""], ["one", None], ["one", 2], [["one"]], ["-oX=y"]],
    ids=repr,
)
def test_hosts_that_name_no_process_are_refused(bad):
    (problem,) = refused(run__launch__hosts=bad)
    assert problem.key == "run.launch.hosts"
    assert "a number of processes of at least 1" in problem.expected


@pytest.mark.parametrize(
    ("hosts", "workers", "here"),
    [
        (None, 1, 1),
        (1, 1, 1),
        (3, 3, 3),
        (["127.0.0.1", "localhost"], 2, 2),
        (["a", "10.0.0.2"], 2, 0),
    ],
    ids=repr,
)
def test_workers_are_counted(hosts, workers, here):
    assert not refused(run__launch__hosts=hosts)
    launch = schema.Launch(hosts=hosts)
    assert (launch.workers(), launch.here()) == (workers, here)


def test_shares_must_add_up():
    (problem,) = refused(data__shares__test=0.2)
    assert problem.key == "data.shares"


def test_yaml_words_for_on_and_off_keep_their_meaning(project):
    (project / "params.yaml").write_text(GOOD + "memory: {activation_cache: off, loss_chunk: off}")
    memory = settings.load_settings().memory
    assert (memory.activation_cache, memory.loss_chunk) == ("off", "off")


@pytest.mark.parametrize(
    "text", ["", "# nothing yet\n", "memory:\n", "memory:\n  # budget_gb: 6\n"]
)
def test_a_local_yaml_that_says_nothing_changes_nothing(project, text):
    without = settings.load_settings()
    (project / "local.yaml").write_text(text)
    assert settings.load_settings() == without


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory: 3\n", ["memory is a group", "batch_size"]),
        ("memory: [budget_gb]\n", ["memory is a group"]),
        ("run: {launch: 3}\n", ["run.launch is a group", "hosts"]),
        ("memory: {budget_gb: '${nope}'}\n", ["cannot be read", "nope"]),
        ("memory: {budget_gb: '${a:b'}\n", ["cannot be read"]),
        ("hello\n", ["run.* only", "write `memory:`"]),
        ("3\n", ["cannot be read"]),
        ("- memory\n", ["no keys"]),
        ("memory: {budget_gb: 3}\n---\nrun: {}\n", ["not YAML"]),
    ],
)
def test_a_local_yaml_that_makes_no_sense_is_refused_with_all_four_parts(project, text, words):
    (project / "local.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        settings.load_settings()
    for word in words:
        assert word in str(caught.value)
    assert all(caught.value.record().values())


@pytest.mark.parametrize(
    "word", ["memory=3", "memory.budget_gb=: :", "memory.budget_gb=${x}", "run.x=["]
)
def test_a_word_of_the_command_line_that_makes_no_sense_is_refused(project, word):
    with pytest.raises(UserError) as caught:
        settings.load_settings(overrides=[word])
    assert "command line" in caught.value.where


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("train: {learning_rate: fast}", "a number"),
        ("train: {updates: 2.5}", "a whole number, or null"),
        ("train: {lora_parameters: {keys: q_proj}}", "a list, or null"),
    ],
)
def test_a_wrong_type_names_the_right_one(project, yaml, expected):
    (project / "params.yaml").write_text(yaml)
    with pytest.raises(UserError, match="wrong type") as caught:
        settings.load_settings()
    assert caught.value.expected == expected


@pytest.mark.parametrize("key", checks.TEXT)
@pytest.mark.parametrize("value", ["", "  ", "a\0b"], ids=["empty", "spaces", "nul"])
def test_a_name_is_null_or_not_empty(key, value):
    keys = [problem.key for problem in refused(**{key.replace(".", "__"): value})]
    assert key in keys


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": {"a": "b"}}, "no column"),
        ({"prompt": None}, "no column"),
        ({"prompt": " "}, "no column"),
        ({"prompt": "a", "completion": "a"}, "one column twice"),
    ],
    ids=["nested", "null", "spaces", "twice"],
)
def test_columns_are_names_and_each_stands_once(columns, words):
    (problem,) = refused(data__columns=columns)
    assert problem.key == "data.columns" and words in problem.message
    assert not refused(data__columns={"prompt": "a", "completion": "b"})


@pytest.mark.parametrize(
    "key", [key for key, (_, most) in checks.RANGES.items() if most == checks.MOST]
)
def test_numbers_that_no_machine_word_holds_are_refused(key):
    edits = {key.replace(".", "__"): 10**20}
    if key == "train.epochs":
        edits["train__updates"] = None
    assert key in [problem.key for problem in refused(**edits)]
