import json
import math
import re
import shutil
import subprocess

import pandas as pd
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from stages.commands.proving.finding import Finding
from stages.core.config import schema
from stages.core.config.checks import CHOICES
from stages.core.errors import UserError
from stages.report import inputs, page, run, samples
from tests.report import example
from tests.report.parsing import Page

SECTIONS = ["result", "samples", "training", "data", "checks", "machine", "proof", "run"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    example.write(tmp_path)
    return tmp_path


def built(settings=example.SETTINGS):
    return Page(page.build(inputs.read(settings)))


def test_every_section_is_there_and_linked(folder):
    found = built()
    assert list(found.sections) == SECTIONS
    assert [a["href"] for a in found.named("a")] == [f"#{name}" for name in SECTIONS]
    assert "not there yet" not in found.text


def test_nothing_comes_from_outside(folder):
    found = built()
    for name, attributes in found.elements:
        assert name not in {"script", "link", "iframe", "object", "embed", "form", "base"}
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}:
                assert value.startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"url\(|@import|https?:", found.style)
    policy = next(m["content"] for m in found.named("meta") if "http-equiv" in m)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_page_is_for_light_dark_phone_and_print(folder):
    found = built()
    for query in ("(prefers-color-scheme: dark)", "screen and (max-width: 46rem)", "print"):
        assert f"@media {query}" in found.style
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in found.named(
        "meta"
    )


def test_text_of_the_data_stays_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example.write(tmp_path, hostile=True)
    found = built()
    assert not found.named("script")
    assert [image["src"][:5] for image in found.named("img")] == ["data:"]
    visible = example.HOSTILE.replace("\x07", "\\x07")
    for section in ("samples", "data", "checks", "result"):
        assert visible in found.sections[section], section


def test_numbers_of_the_result_are_those_of_metrics_json(folder):
    text = built().sections["result"]
    for number in ("2.4137", "1.8311", "11.18", "6.241", "51.2%", "60.3%", "−0.5826"):
        assert number in text
    for number in ("−0.6612 to −0.5034", "12,345 targets", "80 rows", "94% of the rows"):
        assert number in text
    for number in ("512–1023", "1,145", "2.0500", "1.6600", "−0.3900"):  # by length
        assert number in text
    for number in ("2.4191", "1.8420", "−0.5771"):  # rows not in train
        assert number in text
    assert "−44.2%" in text  # exp(1.8311 - 2.4137) - 1
    assert "33.3%" in built().sections["samples"]  # exact match
    assert round(100 * (math.exp(1.8311 - 2.4137) - 1), 1) == -44.2


def test_numbers_of_training_data_and_machine(folder):
    found = built()
    history = example.tables()[0]
    assert f"{history['targets'].sum():,} targets" in found.sections["training"]
    for number in ("641", "640", "404 (1.0%)", "171,717", "5,117", "mine/train.jsonl:17"):
        assert number in found.sections["data"], number
    assert "40,000" in found.sections["data"]  # after split,
    assert "268.3" in found.sections["data"]  # 171,717 / 640
    assert "40,404" not in found.sections["data"]  # not before it
    for words in ("studio-7", "Example CPU 3000", "61 GFLOP/s", "every 2nd layer", "1.110\u00a0GB"):
        assert words in found.sections["machine"], words
    for words in ("mlx-lm", "0.32.2", example.SHA, "builtin:docstrings", "0.0002"):
        assert words in found.sections["run"], words


def test_targets_are_marked_and_nothing_else(folder):
    source = page.build(inputs.read(example.SETTINGS))
    marks = re.findall("<mark>(.*?)</mark>", source, flags=re.DOTALL)
    assert marks == ["Return the distance between two points as a float.&lt;|im_end|&gt;"]
    assert "⟦" not in source


def test_warnings_come_before_passed_checks(folder):
    checks = built().sections["checks"]
    assert checks.index("3 valid rows are few") < checks.index("2 checks passed")
    assert "at least 8" in checks


def test_validation_points_say_their_loss(folder):
    titles = built().sections["training"]
    for point in ("20: 1.84", "40: 1.71", "60: 1.68"):
        assert point in titles


def test_an_interrupted_run_shows_what_there_is(folder):
    shutil.rmtree(folder / "reports/evaluate")
    shutil.rmtree(folder / "reports/train")
    shutil.rmtree(folder / "adapters")
    found = built()
    assert list(found.sections) == SECTIONS
    assert "not complete: nothing there yet from train, evaluate" in found.text
    assert "It has not been compared" in found.text
    assert "dvc repro evaluate" in found.sections["result"]
    assert "dvc repro train" in found.sections["training"]
    assert "171,717" in found.sections["data"]


def test_a_run_in_the_middle_shows_its_newest_checkpoint(folder):
    for number in (10, 20):
        saved = folder / f".cache/checkpoints/0123456789abcdef/{number:08d}"
        saved.mkdir(parents=True)
        for name in ("history.csv", "valid.csv", "run.csv"):
            lines = (folder / "reports/train" / name).read_text().splitlines()
            (saved / name).write_text("\n".join(lines[: number + 1]) + "\n")
        (saved / "state.json").write_text(json.dumps({"plan": {"batch_size": 3}}))
    shutil.rmtree(folder / "reports/train")
    found = built()
    assert "newest checkpoint on this machine, update 20" in found.sections["training"]
    assert "20 updates of at most 16 examples" in found.sections["training"]
    assert "3 examples at most" in found.sections["machine"]


def test_nothing_at_all_is_still_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = built(schema.Settings(model=schema.Model(path="some/folder")))
    assert list(found.sections) == SECTIONS
    assert "folder on data/source" in found.text
    assert found.text.count("not there yet") == 7


def test_a_run_that_stopped_says_where_and_why(folder):
    record = {"update": 31, "what": "loss nan, gradient norm nan", "examples": []}
    (folder / "reports/train/stopped.json").write_text(json.dumps(record))
    assert "stopped at update 31: loss nan" in built().sections["training"]


def test_a_run_that_ended_early_says_so(folder):
    file = folder / "reports/train/run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "updates_of_whole_run": 90}))
    assert "ended after update 60 of 90" in built().sections["training"]


def test_torn_json_is_named(folder):
    (folder / "reports/split.json").write_text('{"splits": {')
    with pytest.raises(UserError, match="not valid JSON"):
        built()


def test_skipped_updates_leave_a_gap_in_the_curve(folder):
    file = folder / "reports/train/history.csv"
    lines = file.read_text().splitlines()
    cells = lines[30].split(",")
    lines[30] = ",".join([*cells[:2], "", *cells[3:6], ""])
    file.write_text("\n".join(lines) + "\n")
    source = page.build(inputs.read(example.SETTINGS))
    d = re.search(r'<path d="([^"]*)" class="line s0 faint"', source).group(1)
    assert d.count("M") == 2
    assert d.count("L") == 57


def test_no_clear_change_is_called_that(folder):
    file = folder / "reports/evaluate/metrics.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "loss_change_high": 0.01}))
    assert "shows no clear change" in built().text


def test_the_command_with_all_settings_gives_these_settings_back():
    settings = schema.Settings(
        model=schema.Model(repo="org/name", revision="1234567"),
        data=schema.Data(path="data/source/my rows, new", columns={"text": "the words"}),
        train=schema.Train(optimizer_config={"adamw": {"weight_decay": 0.01}}, epochs=1.5),
    )
    settings.train.lora_parameters.keys = ["self_attn.q_proj", "mlp.up_proj"]
    tree = run.settings.as_dict(settings, schema.MATHEMATICS)
    words = [word.strip("'") for word in run.overrides(tree)]
    parsed = OverridesParser.create().parse_overrides(words)
    found = {one.key_or_group: one.value() for one in parsed}
    assert found == dict(run.flat(tree))


def test_commit_and_changes_are_in_the_repeat_command():
    def lines(commit, *changed):
        return run.commands(inputs.Inputs(example.SETTINGS, commit=commit, changed=list(changed)))

    assert lines("") == ["make repro"]
    assert lines("abc123") == ["git checkout abc123", "make repro"]
    first, note, last = lines("abc123", "conf/config.yaml", "params.yaml")
    assert (first, last) == ("git checkout abc123", "make repro")
    assert note == "# made with changes to conf/config.yaml, params.yaml, which this commit lacks"
    assert "All settings as one command" in lines("abc123", "params.yaml")[2]
    assert "a, b, c, d, e and 2 more, which" in lines("abc123", *"abcdefg")[1]


def test_what_a_run_writes_itself_is_no_change_to_its_commit(folder):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, cwd=folder
        )

    (folder / "conf").mkdir()
    for name in ("dvc.lock", "conf/größe.yaml"):
        (folder / name).write_text("a")
    git("init", "-q")
    git("add", "dvc.lock", "conf", "reports/evaluate/metrics.json")
    git("commit", "-q", "-m", "start")
    (folder / "dvc.lock").write_text("b")
    metrics = folder / "reports/evaluate/metrics.json"
    metrics.write_text(metrics.read_text() + "\n")
    found = inputs.read(example.SETTINGS)
    assert len(found.commit) == 12
    assert found.changed == []
    (folder / "conf/größe.yaml").write_text("b")
    assert inputs.read(example.SETTINGS).changed == ["conf/größe.yaml"]
    assert "größe.yaml, which this commit lacks" in built().sections["run"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
        ("Qwen3-0.6B-Q8_0", "Qwen3-0.6B"),
        ("model.IQ4_XS.gguf", "model"),
        ("Llama-3.2-1B-F16", "Llama-3.2-1B"),
        ("Qwen2.5-Q", "Qwen2.5-Q"),
        ("Q4_1", "Q4_1"),
    ],
)
def test_the_headline_names_the_model_and_the_facts_its_file(folder, name, shown):
    file = folder / "data/model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "name": name}))
    found = built()
    assert f"{shown} on docstrings" in found.text
    assert name in found.sections["run"]


def test_code_between_fences_is_set_as_code_and_nothing_is_lost():
    text = "Say\n```python\na < b\n```\nand `this`\n```\ncut of"
    shown = samples.worded(text)
    assert Page(shown).text == text
    assert re.findall('<span class="mono">(.*?)</span>', shown, flags=re.DOTALL) == [
        "```python\na &lt; b\n```",
        "```\ncut of",
    ]


def test_time_and_speed_of_all_updates_together(folder):
    telemetry = pd.DataFrame(
        {"update": [1, 2, 3], "seconds": [10, 30, None], "tokens_per_second": [100, 200, None]}
    )
    telemetry.to_csv(folder / "reports/train/run.csv", index=False)
    assert "40.0 s, 175 tokens per second" in built().sections["machine"]
    telemetry.assign(seconds=None).to_csv(folder / "reports/train/run.csv", index=False)
    assert "updates took" not in built().sections["machine"]


def test_a_plan_without_prediction_says_so(folder):
    file = folder / "reports/train/run.json"
    record = json.loads(file.read_text())
    record["plan"]["predicted_peak_gb"] = None
    file.write_text(json.dumps(record))
    text = built().sections["machine"]
    assert "measured 1.093\u00a0GB, by rule and not predicted" in text


@pytest.mark.parametrize(
    ("policy", "words"),
    [("split", "cut into pieces"), ("truncate_end", "lose their end"), ("drop", "left out")],
)
def test_the_policy_for_long_rows_is_a_sentence(folder, policy, words):
    assert policy in CHOICES["split.policy"]
    settings = schema.Settings(split=schema.Split(policy=policy, max_seq_length=1500))
    text = built(settings).sections["data"]
    assert "Rows of more than 1,500 tokens" in text
    assert words in text


def test_a_page_stays_small_whatever_the_run_was(folder):
    """100,000 rows, 10,000 samples, 60,000 updates, 50,000 refused rows."""
    rows = example.rows(100_000)
    rows.to_parquet(folder / "reports/evaluate/rows.parquet")
    file = folder / "reports/evaluate/samples.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "samples": record["samples"] * 3334}))
    history = pd.concat([example.tables()[0]] * 1000).assign(update=range(1, 60_001))
    history.to_csv(folder / "reports/train/history.csv", index=False)
    file = folder / "reports/collect.json"
    record = json.loads(file.read_text())
    train = record["splits"]["train"]
    train |= {"rejected": train["rejected"] * 50_000, "rejected_rows": 50_000}
    file.write_text(json.dumps(record))
    source = page.build(inputs.read(example.SETTINGS))
    assert len(source.encode()) < 400_000
    text = Page(source).text
    for words in ("50,000 rows left out", "49,950 more", "9,982 more", "one row in 167 is drawn"):
        assert words in text


def test_findings_of_prove_stand_in_a_table_part_by_part(folder):
    findings = [
        Finding("resume", "stopped", 0.0, tolerance=0.0, note="the same bytes"),
        Finding("cuts", "one by one", 3.44e-7, tolerance=1e-5, loss=0.0),
        Finding("cuts", "two by two", 2e-3, tolerance=1e-5, loss=4e-8),
        Finding("cuts", "three by three", math.inf, tolerance=1e-5, loss=math.nan),
        Finding("memory", "compiled", None, tolerance=1e-5, note="slower"),
    ]
    file = folder / "reports/prove.json"
    report = json.loads(file.read_text()) | {"results": [one.record() for one in findings]}
    file.write_text(json.dumps(report, allow_nan=False))
    text = built().sections["proof"]
    assert "2 comparisons out of tolerance" in text
    rows = [
        "plain whole batchcomparedmeasuredlossat most",  # a heading and the columns
        "one by one3.4e-0701e-05passed",
        "two by two2.0e-034.0e-081e-05missed",
        "three by threeinfnan1e-05missed",
        "memory settingcomparedmeasuredlossat most",
        "compiledslower–––not used",
        "stoppedthe same bytes0–0passed",
    ]
    places = [text.find(row) for row in rows]
    assert -1 not in places
    assert places == sorted(places)


def test_result_of_prove_or_how_to_get_it(folder):
    text = built().sections["proof"]
    for words in ("took the same step", "1 example at a time", "3.4e-07", "2.1e-06", "1e-05"):
        assert words in text
    assert text.count("passed") == 4
    assert "attention in blocks of 128no call of it–––not used" in text
    file = folder / "reports/prove.json"
    report = json.loads(file.read_text())
    report["results"][3] |= {"passed": False, "measured": "nan"}
    file.write_text(json.dumps(report))
    text = built().sections["proof"]
    assert "1 comparison out of tolerance" in text
    assert "nan" in text
    file.unlink()
    assert "python -m stages prove" in built().sections["proof"]
