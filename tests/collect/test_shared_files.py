"""Real files of other projects, read from a folder beside the repository: counts from their notes.

`expected.json` in each folder was made without this project. Numbers of lines, repeats, refused
rows and blank lines must agree for every file in it.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from stages.collect.collect import collect
from stages.core.config.schema import Data, Shares
from stages.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT.parent / "shared" / "files"
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="no shared/files beside the repository")

# These have tests of their own below.
NOTHING_TO_TRAIN = ("v1_multimodal_demo.jsonl", "tools_expanded.jsonl", "empty.jsonl")


def expectations():
    """(folder, file, what is expected) of every file that holds rows."""
    for path in sorted(FILES.glob("*/expected.json")):
        for name, expected in json.loads(path.read_text(encoding="utf-8")).items():
            if "rows" in expected and Path(name).name not in NOTHING_TO_TRAIN:
                yield pytest.param(
                    path.parent / name, expected, id=f"{path.parent.name[:2]}-{name}"
                )


def folder(number):
    return next(FILES.glob(f"{number}-*"))


def refusal(path, workspace, **settings):
    out = workspace / "refused"
    out.mkdir()
    with pytest.raises(UserError) as caught:
        collect(Data(path=str(path), **settings), out)
    return caught.value


@pytest.mark.parametrize(("path", "expected"), list(expectations()) if FILES.is_dir() else [])
def test_each_file_gives_the_rows_its_note_says(run, path, expected):
    found = run(path, on_bad_row="drop")
    split = found.report["splits"]["train"]
    refused = sorted(line for line, _ in [*expected.get("bad_json", []), *expected["rejected"]])
    assert [bad["line"] for bad in split["rejected"]] == refused
    assert split["rows_out"] == expected["kept_strict"]
    assert split["rows_in"] == expected["rows"] + len(expected.get("bad_json", []))
    assert split["blank_lines"] == len(expected.get("blank_lines", []))
    pairs = [[pair["same_as"], pair["line"]] for pair in split["duplicates"]]
    assert pairs == sorted(expected["duplicates"], key=lambda pair: pair[1])
    kinds = {"text": "text", "completions": "completion", "alpaca": "completion"}
    strict = Counter()
    for form, count in expected["formats"].items():
        if not form.startswith("unknown"):
            strict[kinds.get(form, "chat")] += count
    if not refused:
        assert Counter(row["kind"] for row in found.tables["train"]) == strict


def test_02_the_leak_is_named_line_by_line(run):
    found = run(folder("02"), shares=Shares(train=1, valid=0, test=0))
    leaked = [1, 2, 5, 37, 70, 76, 78, 107, 108, 109, 110, 111, 115, 116, 136, 140]
    assert [leak["line"] for leak in found.report["leaks"]] == leaked
    assert found.report["leaked_rows"] == {"valid": 16, "test": 0}
    splits = found.report["splits"]
    assert splits["train"]["rows_out"] - splits["train"]["duplicate_rows"] == 272
    assert splits["valid"]["rows_out"] - splits["valid"]["duplicate_rows"] == 123


def test_04_a_missing_test_split_is_said(run):
    found = run(folder("04") / "mlx_data")
    assert [len(found.tables[name]) for name in ("train", "valid", "test")] == [87, 21, 0]
    assert any("there is no test file" in note for note in found.report["notes"])
    cut = run(folder("04") / "mlx_data", shares=Shares())
    assert [len(cut.tables[name]) for name in ("train", "valid", "test")] == [78, 21, 9]


def test_05_bom_and_crlf_change_nothing(run):
    plain = run(folder("05") / "valid.jsonl")
    derived = run(folder("05") / "derived_bom_crlf/valid.jsonl")
    assert derived.records() == plain.records()
    text = json.dumps(derived.records(), ensure_ascii=False)
    assert "\\r" not in text
    assert "\ufeff" not in text


def test_07_placeholders_stay_literal_and_are_counted(run):
    path = folder("07") / "identity.json"
    source = json.loads(path.read_text(encoding="utf-8"))
    found = run(path)
    assert [record["completion"] for record in found.records()] == [row["output"] for row in source]
    rows = sum("{{name}}" in row["output"] or "{{author}}" in row["output"] for row in source)
    assert any(note.startswith(f"{rows} rows have placeholders") for note in found.report["notes"])


def test_08_every_call_and_observation_arrives(run):
    found = run(folder("08") / "glaive_toolcall_en_demo.json")
    turns = [turn for record in found.records() for turn in record["messages"]]
    assert Counter(turn["role"] for turn in turns) == {"user": 184, "assistant": 239, "tool": 55}
    calls = [call for turn in turns for call in turn.get("tool_calls", [])]
    assert len(calls) == 55
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    tools = Counter(len(record.get("tools", [])) for record in found.records())
    assert tools == {0: 27, 1: 40, 2: 6}
    assert all(record["messages"][-1]["role"] == "assistant" for record in found.records())


def test_09_parts_become_text_thoughts_and_calls(run):
    found = run(folder("09") / "reason_tool_use_demo_50.jsonl")
    turns = [turn for record in found.records() for turn in record["messages"]]
    assert sum("reasoning_content" in turn for turn in turns) == 53
    assert sum(len(turn.get("tool_calls", [])) for turn in turns) == 36
    assert all(isinstance(turn["content"], str) for turn in turns)
    assert all(isinstance(record["tools"], list) for record in found.records())


def test_09_images_are_refused_by_line_and_leave_no_rows(run, workspace):
    path = folder("09") / "v1_multimodal_demo.jsonl"
    error = refusal(path, workspace)
    assert error.what == "24 of 24 rows cannot be used"
    listed = json.loads((workspace / ".cache/bad_rows.json").read_text())["listed"]
    assert [bad["line"] for bad in listed] == list(range(1, 25))
    assert all("image_url" in bad["reason"] for bad in listed)
    with pytest.raises(UserError) as caught:
        run(path, on_bad_row="drop")
    assert caught.value.what == "No row of train is left"


def test_12_the_row_without_a_user_is_kept_and_said(run):
    found = run(folder("12") / "toy_chat_fine_tuning.jsonl")
    assert any("no user turn" in note and "line 4)" in note for note in found.report["notes"])


def test_15_an_expanded_object_is_one_message(workspace):
    error = refusal(folder("15") / "tools_expanded.jsonl", workspace)
    assert error.what == "1 of 1 rows cannot be used"
    assert "line 1 is not a JSON object; one object seems to be spread over lines 1 to 38" in (
        error.found
    )


def test_15_arguments_in_a_string_become_an_object(run):
    (record,) = run(folder("15") / "tools.jsonl").records()
    (call,) = record["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == {"location": "San Francisco, USA", "format": "celsius"}
    assert record["messages"][1]["content"] == ""


def test_17_an_empty_file_is_said_and_bad_lines_come_at_once(workspace):
    path = folder("17")
    out = workspace / "out"
    out.mkdir()
    with pytest.raises(UserError) as caught:
        collect(Data(path=str(path / "empty.jsonl")), out)
    assert "empty.jsonl is empty" in caught.value.found
    error = refusal(path / "chat_broken.jsonl", workspace)
    shown = [line.strip() for line in error.found.strip().split("\n")]
    assert [line.split(":")[1] for line in shown] == ["2", "3", "4", "5", "6"]
    assert shown[3].startswith("chat_broken.jsonl:5:1: not JSON")


def test_18_the_empty_answer_is_reported_and_the_others_stay(run):
    found = run(folder("18") / "conversation.missingturns.json")
    (record,) = found.records()
    assert len(record["messages"]) == 12
    assert record["messages"][1] == {"role": "assistant", "content": ""}
    assert any("an assistant turn without words" in note for note in found.report["notes"])


def test_19_forms_are_found_row_by_row_or_fixed_by_the_user(run, workspace):
    path = folder("19") / "sample_dataset.jsonl"
    mapping = {entry["form"]: entry["rows"] for entry in run(path).report["mapping"]}
    assert mapping == {"sharegpt": 3, "chat": 2, "alpaca": 3}
    fixed = run(path, on_bad_row="drop", format="sharegpt").report["splits"]["train"]
    assert [bad["line"] for bad in fixed["rejected"]] == [4, 5, 6, 7, 8]


def test_24_arabic_text_comes_back_and_five_rows_are_said_to_be_few(run):
    path = folder("24") / "arabic_sft_samples.json"
    source = json.loads(path.read_text(encoding="utf-8"))
    assert [r["completion"] for r in run(path).records()] == [row["output"] for row in source]
    cut = run(path, shares=Shares())
    assert any("5 rows are too few for a share" in note for note in cut.report["notes"])
