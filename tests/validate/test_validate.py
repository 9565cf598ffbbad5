"""Every check, one spoilt run each, and all problems of one run at once."""

import json
from pathlib import Path

import pytest

from stages.core.errors import UserError
from stages.validate.work import validate
from tests.validate import case


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(settings=None):
    return validate(
        Path("data/examples"), Path("data/model.json"), Path("reports"), settings or case.settings()
    )


def check(report, name):
    return next(entry for entry in report["checks"] if entry["name"] == name)


def failed(settings=None):
    """The checks of a refused run."""
    with pytest.raises(UserError) as caught:
        run(settings)
    report = json.loads(Path(".cache/validate.json").read_text())
    assert report["ok"] is False
    errors = [entry for entry in report["checks"] if entry["level"] == "error"]
    return caught.value, {entry["name"]: entry for entry in errors}


def test_nothing_wrong(workspace):
    case.write(workspace)
    report = run()
    assert report["ok"] is True
    assert {entry["level"] for entry in report["checks"]} == {"ok"}
    assert (report["examples"], report["targets"]) == (20, 60)
    # 20 examples, 8 an update: 8 + 8 + 4.
    assert (report["updates_per_epoch"], report["updates"]) == (3, 10)
    for entry in report["checks"]:
        assert set(entry) == {"name", "level", "message", "found", "expected", "fix"}


def test_epochs_give_updates(workspace):
    case.write(workspace)
    report = run(case.settings(updates=None, epochs=2.0))
    assert report["updates"] == 6


def test_train_below_the_effective_batch(workspace):
    """D1: both numbers and the remedy."""
    case.write(workspace, train=3)
    error, errors = failed(case.settings(effective_batch_size=4))
    assert list(errors) == ["train_examples"]
    assert "below the effective batch" in error.what
    assert error.found == "3"
    assert "4" in error.expected
    assert "train.effective_batch_size to 3" in error.fix


def test_train_of_one_effective_batch_is_enough(workspace):
    case.write(workspace, train=8)
    assert run()["updates_per_epoch"] == 1


def test_short_valid_and_test_are_used(workspace, capsys):
    """D1: one line each, no warning."""
    case.write(workspace, valid=1, test=1)
    report = run()
    for name in ("valid_examples", "test_examples"):
        entry = check(report, name)
        assert entry["level"] == "ok"
        assert "1 example, and it is used" in entry["message"]
    assert capsys.readouterr().err.count("1 example, and it is used") == 2


def test_empty_valid_is_a_warning(workspace):
    case.write(workspace, valid=0)
    entry = check(run(), "valid_examples")
    assert entry["level"] == "warning"
    assert "no best adapter, no patience" in entry["message"]


def test_empty_test_is_an_error(workspace):
    case.write(workspace, test=0)
    _, errors = failed()
    assert "nothing to evaluate" in errors["test_examples"]["message"]
    settings = case.settings()
    settings.evaluate.split = "valid"
    assert check(run(settings), "test_examples")["level"] == "warning"


def test_empty_train(workspace):
    case.write(workspace, train=0)
    _, errors = failed()
    assert set(errors) == {"train_examples", "updates"}
    assert "0 updates" in errors["updates"]["message"]


def test_a_clean_test_set_shows_no_numbers(workspace):
    """Train depends on the report: more test rows must not train again."""
    case.write(workspace, test=9)
    before = run()
    case.write(workspace, test=12)
    assert run() == before


@pytest.mark.parametrize(
    ("key", "values"),
    [("split.max_target_loss", (0.2, 0.3)), ("data.max_leak", (0.5, None))],
)
def test_thresholds_that_hold_change_nothing(workspace, key, values):
    reports = {"split": case.split_report(), "collect": leaking()}
    reports["split"]["splits"]["train"]["targets_lost"] = 5
    case.write(workspace, reports=reports)
    group, name = key.split(".")
    found = []
    for value in values:
        settings = case.settings()
        settings.split.max_target_loss = 0.5
        setattr(getattr(settings, group), name, value)
        found.append(run(settings))
    assert found[0] == found[1]


def leaking():
    leaks = [
        {"split": "valid", "source": "v.jsonl", "line": line, "train_source": "t", "train_line": 1}
        for line in (3, 8)
    ]
    return case.collect_report(leaks=leaks, leaked_rows={"valid": 2, "test": 0})


def test_leaks_are_counted_and_named(workspace):
    """D9: 2 of 20 valid rows."""
    case.write(workspace, reports={"collect": leaking()})
    entry = check(run(), "leaks")
    assert entry["level"] == "warning"
    assert "2 rows (10.00%; v.jsonl lines 3, 8)" in entry["found"]
    settings = case.settings()
    settings.data.max_leak = 0.05
    _, errors = failed(settings)
    assert "data.max_leak=5.00%" in errors["leaks"]["expected"]


def test_duplicates_are_counted_and_named(workspace):
    report = case.collect_report()
    repeats = [{"source": "t.jsonl", "line": 162, "same_as": 161}]
    report["splits"]["train"] |= {"duplicate_rows": 1, "duplicates": repeats}
    case.write(workspace, reports={"collect": report})
    entry = check(run(), "duplicates")
    assert entry["level"] == "warning"
    assert "train: 1 (t.jsonl line 162)" in entry["found"]


@pytest.mark.parametrize(("lost", "level"), [(3, "warning"), (4, "error")])
def test_targets_lost(workspace, lost, level):
    """3 of 63 targets are 4.8%, 4 of 64 are 6.25%; the default limit is 5%."""
    report = case.split_report()
    report["splits"]["train"] |= {"targets_lost": lost, "rows_truncated": 1, "end_tokens_lost": 1}
    case.write(workspace, reports={"split": report})
    settings = case.settings()
    settings.split.policy = "truncate_end"
    if level == "error":
        error, errors = failed(settings)
        assert "6.25%" in errors["targets_lost"]["found"]
        assert "split.policy=split" in error.fix
        return
    entry = check(run(settings), "targets_lost")
    assert entry["level"] == "warning"
    assert "4.76%" in entry["found"]
    assert check(run(settings), "end_tokens_lost")["level"] == "warning"


def test_rows_left_out_are_named(workspace):
    collect, tokenize = case.collect_report(), case.tokenize_report()
    row = {"source": "a.jsonl", "line": 7, "reason": "broken"}
    collect["splits"]["train"]["rejected"] = [row]
    tokenize["splits"]["valid"]["rejected"] = [row | {"line": 9}]
    case.write(workspace, reports={"collect": collect, "tokenize": tokenize})
    report = run()
    assert "train: 1 (a.jsonl line 7)" in check(report, "rows_refused")["found"]
    assert "valid: 1 (a.jsonl line 9)" in check(report, "rows_without_target")["found"]


def test_rows_without_an_end(workspace):
    report = case.tokenize_report()
    report["splits"]["train"]["forms"]["chat"] = {"rows": 4, "ends_in_target": 0.5}
    case.write(workspace, reports={"tokenize": report})
    assert "chat: 50.0% of 4 rows" in check(run(), "ends_of_turns")["found"]


def test_template_tags(workspace):
    report = case.tokenize_report()
    tags = {"rows": 1, "examples": {"<|end|>": [{"source": "a.jsonl", "line": 5}]}}
    report["splits"]["train"]["template_tags"] = tags
    case.write(workspace, reports={"tokenize": report})
    assert "<|end|> (a.jsonl line 5)" in check(run(), "template_tags")["found"]


@pytest.mark.parametrize(("asked", "trained"), [(4, "4 of 4"), (-1, "4 of 4"), (1, "1 of 4")])
def test_num_layers(workspace, asked, trained):
    case.write(workspace)
    assert check(run(case.settings(num_layers=asked)), "num_layers")["found"] == f"{trained} layers"


def test_more_layers_than_there_are(workspace):
    case.write(workspace)
    error, _ = failed(case.settings(num_layers=5))
    assert (error.found, error.expected) == ("5", "1 to 4, or -1 for all")


def test_keys_that_match_no_layer(workspace):
    case.write(workspace)
    settings = case.settings()
    settings.train.lora_parameters.keys = ["self_attn.q_proj", "mlp.downproj"]
    error, _ = failed(settings)
    assert error.found == "mlp.downproj"
    assert "mlp.downproj → mlp.down_proj" in error.fix
    settings.train.lora_parameters.keys = []
    error, _ = failed(settings)
    assert "nothing is trained" in error.what
    settings.train.lora_parameters.keys = ["lm_head"]
    assert check(run(settings), "lora_keys")["level"] == "ok"


def test_full_on_quantized_weights(workspace):
    case.write(workspace, case.manifest(quantization={"bits": 4, "group_size": 64}))
    error, errors = failed(case.settings(fine_tune_type="full"))
    assert list(errors) == ["full_on_quantized"]
    assert "4-bit" in error.found


def test_token_ids_beyond_the_embedding(workspace):
    case.write(workspace, token=260)
    error, _ = failed()
    assert (error.found, error.expected) == ("260", "0 to 259")


def test_a_tokenizer_larger_than_the_embedding(workspace):
    case.write(workspace, case.manifest(vocab_size=300))
    assert check(run(), "vocabulary")["level"] == "warning"


def test_examples_longer_than_the_model_was_made_for(workspace):
    case.write(workspace, case.manifest(max_positions=3))
    entry = check(run(), "positions")
    assert (entry["level"], entry["found"]) == ("warning", "4 tokens")


def test_an_example_without_target(workspace):
    """G9: such an example must never reach training."""
    import pyarrow as pa

    from stages.core import tables

    case.write(workspace)
    columns = {"example": [0], "row": [0], "piece": [0], "tokens": [[1, 2]]}
    table = pa.table({**columns, "target_mask": [[False, False]]}, tables.EXAMPLES)
    with tables.writing(Path("data/examples/valid.parquet"), tables.EXAMPLES) as writer:
        writer.write_table(table)
    _, errors = failed()
    assert errors["examples_without_target"]["found"] == "valid 1"


@pytest.mark.parametrize(("warmup", "good"), [(9, True), (10, False), (0.9, True), (0.99, False)])
def test_warmup(workspace, warmup, good):
    """G4: a warm-up as long as the run of 10 updates is refused."""
    case.write(workspace)
    settings = case.settings()
    settings.train.schedule.warmup = warmup
    if good:
        assert check(run(settings), "schedule")["level"] == "ok"
    else:
        _, errors = failed(settings)
        assert "warm-up of" in errors["schedule"]["found"] or "10" in errors["schedule"]["found"]


def test_stop_at_update(workspace):
    case.write(workspace)
    settings = case.settings(stop_at_update=12)
    assert check(run(settings), "stop_at_update")["level"] == "warning"
    settings = case.settings(stop_at_update=3)
    assert "stops at update 3 of 10" in check(run(settings), "stop_at_update")["message"]
    settings.train.schedule.warmup = 5
    assert check(run(settings), "stop_at_update")["level"] == "warning"


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"patience": 2, "updates_per_eval": 3}, "ok"),
        ({"patience": 3, "updates_per_eval": 3}, "warning"),
        ({"patience": 1}, "warning"),
        ({"updates_per_eval": 11}, "warning"),
        ({"updates_per_eval": 10}, "ok"),
    ],
)
def test_validations(workspace, changes, level):
    case.write(workspace)
    assert check(run(case.settings(**changes)), "validations")["level"] == level


def test_optimizer_config(workspace):
    case.write(workspace)
    error, _ = failed(case.settings(optimizer_config={"adamw": {"weigth_decay": 0.1}}))
    assert "weigth_decay → weight_decay" in error.fix
    error, _ = failed(case.settings(optimizer_config={"weight_decay": 0.1}))
    assert "weight_decay (no optimizer)" in error.found
    other = case.settings(optimizer_config={"sgd": {"momentum": 0.9}})
    assert check(run(other), "optimizer_config")["level"] == "ok"


@pytest.mark.parametrize(
    ("optimizer", "own", "words"),
    [
        ("adamw", {"weight_decay": "big"}, "weight_decay takes a number"),
        ("adamw", {"betas": 3}, "betas takes two numbers"),
        ("adamw", {"betas": [0.9, 0.99, 1]}, "betas takes two numbers"),
        ("adamw", {"bias_correction": 1}, "bias_correction takes true or false"),
        ("adafactor", {"eps": 1e-3}, "eps takes two numbers"),
        ("sgd", {"momentum": None}, "momentum takes a number"),
        ("adamw", [1], "{optimizer: {key: value}}"),
        ("adamw", 3, "{optimizer: {key: value}}"),
    ],
)
def test_values_of_the_wrong_kind_for_the_optimizer(workspace, optimizer, own, words):
    case.write(workspace)
    error, _ = failed(case.settings(optimizer=optimizer, optimizer_config={optimizer: own}))
    assert words in error.fix


def test_values_of_the_right_kind_for_the_optimizer(workspace):
    case.write(workspace)
    for optimizer, own in (
        ("adamw", {"betas": [0.9, 0.99], "eps": 1e-8, "bias_correction": True}),
        ("adafactor", {"eps": [1e-30, 1e-3], "beta_1": None, "relative_step": False}),
    ):
        settings = case.settings(optimizer=optimizer, optimizer_config={optimizer: own})
        assert check(run(settings), "optimizer_config")["level"] == "ok"


def test_dropout_narrows_the_promise(workspace):
    case.write(workspace)
    settings = case.settings()
    settings.train.lora_parameters.dropout = 0.1
    entry = check(run(settings), "dropout")
    assert entry["level"] == "warning"
    assert "distribution" in entry["message"]


def test_initial_adapters(workspace):
    case.write(workspace)
    settings = case.settings(initial_adapters="old")
    error, _ = failed(settings)
    assert "adapters.safetensors" in error.found
    folder = workspace / "old"
    folder.mkdir()
    (folder / "adapters.safetensors").touch()
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    error, _ = failed(settings)
    assert error.found == "rank 4 (train: 8)"
    settings.train.lora_parameters.rank = 4
    outside = check(run(settings), "initial_adapters")
    assert outside["level"] == "warning"
    assert "data/adapters" in outside["fix"]
    (workspace / "data/adapters").mkdir(parents=True)
    folder.rename(workspace / "data/adapters/old")
    settings.train.initial_adapters = "data/adapters/old"
    assert check(run(settings), "initial_adapters")["level"] == "ok"


def test_all_problems_at_once(workspace):
    case.write(workspace, train=3, test=0)
    settings = case.settings(num_layers=9, optimizer_config={"adamw": {"beta": 1}})
    settings.train.lora_parameters.keys = ["none.such"]
    settings.train.schedule.warmup = 50
    error, errors = failed(settings)
    expected = [
        "train_examples",
        "test_examples",
        "num_layers",
        "lora_keys",
        "schedule",
        "optimizer_config",
    ]
    assert list(errors) == expected
    assert error.what == "6 problems stand against this run"
    assert all(f"{name}: " in error.found for name in expected)
    assert not Path("reports/validate.json").exists()
