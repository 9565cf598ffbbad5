"""The whole stage on small files: counts by hand, and what must hold for any input."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from stages.collect import collect as stage
from stages.collect import gather, report, rows
from stages.collect.forms import Rules
from stages.core.config.schema import Data, Shares
from stages.core.errors import UserError
from stages.core.tables import RAW

ROOT = Path(__file__).resolve().parents[2]
GOOD = [{"text": f"row {i}"} for i in range(15)]
BAD = [{"txt": "no key"}, {"text": ""}, {"messages": []}, {"prompt": "q", "completion": 3}]


def lines_of(value):
    return [entry["line"] for entry in value]


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_row_among_15_stops_before_anything_is_written(write, workspace, bad):
    """D4: mlx-lm crashes when it reaches the row."""
    path = write("a.jsonl", [*GOOD[:7], bad, *GOOD[7:]])
    out = workspace / "out"
    out.mkdir()
    with pytest.raises(UserError) as caught:
        stage.collect(Data(path=path), out)
    assert caught.value.what == "1 of 16 rows cannot be used"
    assert "data/source/a.jsonl:8: " in caught.value.found
    assert "data.on_bad_row=drop" in caught.value.fix


def test_all_bad_rows_of_all_files_are_listed_at_once(run, write, workspace):
    write("mine/train.jsonl", [*BAD, *GOOD])
    write("mine/valid.jsonl", [GOOD[0], *BAD * 10])
    with pytest.raises(UserError) as caught:
        run("data/source/mine")
    assert caught.value.what == "44 of 60 rows cannot be used"
    shown = caught.value.found.strip().split("\n")
    assert len(shown) == 21
    assert shown[0].strip().startswith("data/source/mine/train.jsonl:1: keys txt")
    assert shown[4].strip().startswith("data/source/mine/valid.jsonl:2: keys txt")
    assert shown[-1].strip() == "… and 24 more"
    listed = json.loads((workspace / ".cache/bad_rows.json").read_text())
    assert (listed["bad_rows"], len(listed["listed"])) == (44, 44)
    assert ".cache/bad_rows.json" in caught.value.fix


def test_dropped_rows_are_in_the_report(run, write):
    """D4 with data.on_bad_row=drop."""
    path = write("a.jsonl", [GOOD[0], *BAD, *GOOD[1:]])
    found = run(path, on_bad_row="drop")
    assert found.records() == GOOD
    assert found.lines() == [1, *range(6, 20)]
    assert [row["row"] for row in found.tables["train"]] == list(range(15))
    split = found.report["splits"]["train"]
    assert (split["rows_in"], split["rows_out"], split["rejected_rows"]) == (19, 15, 4)
    assert lines_of(split["rejected"]) == [2, 3, 4, 5]
    assert all(entry["source"] == path for entry in split["rejected"])
    assert any("dropped from train: 4 rows" in note for note in found.report["notes"])


def test_when_every_row_is_bad_there_is_nothing_to_train(run, write):
    with pytest.raises(UserError) as caught:
        run(write("a.jsonl", BAD), on_bad_row="drop")
    assert caught.value.what == "No row of train is left"


def test_repeats_and_leaks_are_counted_with_their_lines(run, write):
    """D9: the same row in train and test, also in another form or JSON spaced otherwise."""
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    same = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    alpaca = {"instruction": "do", "input": "it", "output": "y"}
    write("mine/train.jsonl", [GOOD[0], GOOD[1], GOOD[0], chat, alpaca, GOOD[0]])
    write("mine/valid.jsonl", '{"completion":"y",   "prompt":"do\\nit"}\n{"text": "new"}\n')
    write("mine/test.jsonl", [{"text": "row 1"}, same, same])
    found = run("data/source/mine").report
    train, test = (found["splits"][name]["duplicates"] for name in ("train", "test"))
    assert [(pair["line"], pair["same_as"]) for pair in train] == [(3, 1), (6, 1)]
    assert [(pair["line"], pair["same_as"]) for pair in test] == [(3, 2)]
    leaks = [(leak["split"], leak["line"], leak["train_line"]) for leak in found["leaks"]]
    assert leaks == [("valid", 1, 5), ("test", 1, 2), ("test", 2, 4), ("test", 3, 4)]
    assert found["leaked_rows"] == {"valid": 1, "test": 3}
    assert found["leaks"][0]["source"] == "data/source/mine/valid.jsonl"
    assert found["leaks"][0]["train_source"] == "data/source/mine/train.jsonl"


def test_tools_in_another_order_of_keys_are_the_same_row(run, write):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    one = {"messages": turns, "tools": [{"name": "f", "description": "d"}]}
    two = {"tools": [{"description": "d", "name": "f"}], "messages": turns}
    found = run(write("a.jsonl", [one, two]))
    assert found.report["splits"]["train"]["duplicate_rows"] == 1
    order = [list(r["tools"][0]["function"]) for r in found.records()]
    assert order == [["name", "description"], ["description", "name"]]


UNUSUAL = [
    "x" * 1_000_000,
    "שלום עולם, مرحبا؟",
    "\u202eabc\u202c \u200f",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 é",
    "\u00a0 keeps its no-break space \u00a0",
    "a\r\nb\tc\x00d\x1f\x7f\u2028e\ufeff",
    "\U0010ffff\ufffe\ud7ff",
    '\\ " \\n {{name}} ${x} %s <|im_end|>',
]


@pytest.mark.parametrize("escaped", [True, False])
def test_unusual_text_comes_back_as_it_was(run, write, escaped):
    """D10: a row of 1 MB, right-to-left text, emoji with joiners, control characters."""
    lines = [json.dumps({"text": text}, ensure_ascii=escaped) for text in UNUSUAL]
    found = run(write("a.jsonl", "\n".join(lines)))
    assert [record["text"] for record in found.records()] == UNUSUAL
    array = run(write("a.json", "[" + ",".join(lines) + "]"))
    assert array.records() == found.records()


def test_lone_surrogates_and_rows_of_spaces_are_refused_with_a_reason(run, write):
    """D10."""
    lines = [
        '{"text": "fine \\ud83d\\ude42"}',
        '{"text": "broken \\ud83d"}',
        '{"text": "\\ude42 broken"}',
        '{"text": "   "}',
        '{"messages": [{"role": "user", "content": "\\udc00"},'
        ' {"role": "assistant", "content": "a"}]}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],'
        ' "tools": "[{\\"name\\": \\"\\\\ud800\\"}]"}',
    ]
    split = run(write("a.jsonl", "\n".join(lines)), on_bad_row="drop").report["splits"]["train"]
    found = {entry["line"]: entry["reason"] for entry in split["rejected"]}
    assert sorted(found) == [2, 3, 4, 5, 6]
    assert all("lone surrogate" in found[line] for line in (2, 3, 5, 6))
    assert found[4] == "text holds only white space"
    assert split["rejected"][0]["column"] == 18


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": "a", "text": "b"}', "the key 'text' stands twice"),
        ('{"text": NaN}', "NaN"),
        ('["text"]', "a list where an object was expected"),
        ("7", "a number where an object was expected"),
        ("null", "null where an object was expected"),
        ('{"text": "a"} {"text": "b"}', "Extra data"),
        ('{"text": "a\tb"}', "Invalid control character"),
        ('{"text": ' + "[" * 100_000, "nested too deeply"),
        ('{"text": ' + "9" * 5000 + "}", "4300 digits"),
    ],
)
def test_json_that_says_nothing_certain_is_refused(run, write, line, found):
    path = write("a.jsonl", '{"text": "ok"}\n' + line)
    (bad,) = run(path, on_bad_row="drop").report["splits"]["train"]["rejected"]
    assert bad["line"] == 2
    assert found in bad["reason"]


def test_a_missing_split_takes_its_share_of_train_and_says_so(run, write):
    write("mine/train.jsonl", [{"text": f"t{i}"} for i in range(50)])
    write("mine/valid.jsonl", [{"text": f"v{i}"} for i in range(5)])
    found = run("data/source/mine", shares=Shares(train=0.8, valid=0.1, test=0.1))
    sizes = {name: len(table) for name, table in found.tables.items()}
    assert sizes == {"train": 45, "valid": 5, "test": 5}
    texts = [record["text"] for name in ("train", "test") for record in found.records(name)]
    assert sorted(texts) == sorted(f"t{i}" for i in range(50))
    assert any(
        "there is no test file: test takes 5 of train's 50" in n for n in found.report["notes"]
    )
    for name, table in found.tables.items():
        assert [row["row"] for row in table] == list(range(sizes[name]))
        assert found.lines(name) == sorted(found.lines(name))


def test_one_file_is_cut_by_shares_so_that_no_row_is_in_two_parts(run, write):
    values = [i % 40 for i in range(100)]
    path = write("all.jsonl", [{"text": f"t{value}"} for value in values])
    found = run(path, shares=Shares(train=0.6, valid=0.2, test=0.2), seed=3)
    parts = [{r["text"] for r in found.records(name)} for name in ("train", "valid", "test")]
    assert sum(map(len, parts)) == 40
    assert found.report["leaks"] == []
    splits = found.report["splits"]
    assert sum(split["rows_out"] for split in splits.values()) == 100
    assert sum(split["duplicate_rows"] for split in splits.values()) == 60
    assert sum(s["characters"] for s in splits.values()) == sum(len(f"t{v}") for v in values)
    again = run(path, shares=Shares(train=0.6, valid=0.2, test=0.2), seed=3)
    assert again.tables == found.tables


def test_a_set_too_small_for_its_shares_is_said(run, write):
    found = run(write("a.jsonl", GOOD[:5]), shares=Shares())
    assert [len(found.tables[name]) for name in ("train", "valid", "test")] == [3, 1, 1]
    assert any("5 rows are too few for a share of 0.1" in note for note in found.report["notes"])


def test_bad_rows_of_a_file_that_is_cut_count_once(run, write):
    found = run(write("a.jsonl", [*GOOD, *BAD]), shares=Shares(), on_bad_row="drop")
    splits = found.report["splits"].values()
    assert sum(split["rows_in"] for split in splits) == 19
    for split in splits:
        assert split["rows_in"] == split["rows_out"] + len(split["rejected"])


def test_every_oddity_is_a_note(run, write):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"text": "t", "prompt": "Dear {{name}},", "completion": "a"},
        {"messages": [*turns, turns[0]], "id": 1},
        {"messages": [turns[1]]},
        {"messages": [turns[0], {"role": "assistant", "content": ""}, *turns]},
        {"messages": [turns[0], {**turns[1], "weight": 0}]},
    ]
    found = run(write("a.jsonl", rows))
    text = "\n".join(found.report["notes"])
    for words, line in [
        ("the text is not trained", 1),
        ("placeholders like {{name}}", 1),
        ("a last turn of another role", 2),
        ("'id' that no form needs", 2),
        ("no user turn", 3),
        ("an assistant turn without words", 4),
        ("weights are not supported", 5),
    ]:
        (note,) = [note for note in found.report["notes"] if words in note]
        assert note.endswith(f"(data/source/a.jsonl line {line})"), text
    assert found.records()[0]["prompt"] == "Dear {{name}},"


def test_the_mapping_used_is_printed(run, write, capfd):
    run(write("a.csv", "question,answer,id\nq,a,1\n"))
    assert "question → prompt, answer → completion" in capfd.readouterr().err


def test_an_unknown_slot_of_data_columns_is_refused_with_the_nearest(run, write):
    with pytest.raises(UserError) as caught:
        run(write("a.jsonl", GOOD), columns={"promt": "question"})
    assert caught.value.fix == "nearest: prompt"


def test_tables_have_the_columns_of_the_contract(run, write, workspace):
    run(write("a.jsonl", GOOD))
    for name in ("train", "valid", "test"):
        assert pq.read_schema(workspace / f"raw1/{name}.parquet").equals(RAW)


def test_workers_give_the_same_tables_as_one_process(run, write, monkeypatch):
    """Blocks come back in order, bad rows and notes too."""
    from stages.collect import readers

    values = [{"text": f"row {i} {{{{x}}}}"} if i % 7 else {"no": i} for i in range(3000)]
    path = write("a.jsonl", values)
    alone = run(path, on_bad_row="drop")
    monkeypatch.setattr(readers, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(gather, "BYTES_WORTH_WORKERS", 1)
    together = run(path, on_bad_row="drop")
    assert together.tables == alone.tables
    assert together.report == alone.report
    assert together.report["splits"]["train"]["rejected_rows"] == len(range(0, 3000, 7))


def test_lists_in_memory_are_bounded_and_counts_stay_right(run, write, monkeypatch):
    monkeypatch.setattr(gather, "MOST_LISTED", 10)
    monkeypatch.setattr(report, "MOST_LISTED", 10)
    path = write("a.jsonl", [*GOOD[:1] * 30, *BAD * 8])
    split = run(path, on_bad_row="drop").report["splits"]["train"]
    assert (split["rejected_rows"], len(split["rejected"])) == (32, 10)
    assert (split["duplicate_rows"], len(split["duplicates"])) == (29, 10)


MEMORY = """
import json, resource, sys
from pathlib import Path
from stages.collect import gather
from stages.collect.collect import collect
from stages.core.config.schema import Data
gather.BYTES_WORTH_WORKERS = 10**12
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Path("out").mkdir()
collect(Data(path="data/source/a.jsonl"), Path("out"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_file(write, workspace):
    """D12 in small: 96 MB of rows, 24 blocks, add less than the file is large."""
    line = json.dumps({"prompt": "q" * 1000, "completion": "a" * 1000}) + "\n"
    count = 48_000
    text = "".join(f'{{"id": {i}, {line[1:]}' for i in range(count))
    assert len(text) > 96_000_000
    write("a.jsonl", text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 90_000_000
    assert sum(pq.read_metadata(f"out/{s}.parquet").num_rows for s in stage.SPLITS) == count


def test_a_block_is_turned_into_arrays_not_objects():
    """D12: what a block leaves behind is Arrow and NumPy."""
    from stages.collect.blocks import Lines

    found = rows.normalize(Lines(1, b'{"text": "a"}\n{"text": "b"}\n'), Rules())
    assert found.batch.num_rows == 2
    assert isinstance(found.digests, np.ndarray)
    assert found.digests.shape == (2, 2)
    assert found.characters.tolist() == [1, 1]


def test_the_stage_writes_its_outputs_whole_or_not_at_all(workspace, write):
    """As DVC runs it: exit 0 with the outputs, exit 2 and the old outputs with bad rows."""
    write("mine/train.jsonl", GOOD)
    (workspace / "params.yaml").write_text(
        "data: {path: data/source/mine}\nmodel: {repo: 'builtin:tiny'}\ntrain: {updates: 1}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stages.collect"]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    written = sorted(str(p) for folder in ("data/raw", "reports") for p in Path(folder).iterdir())
    names = ["data/raw/test.parquet", "data/raw/train.parquet", "data/raw/valid.parquet"]
    assert written == [*names, "reports/collect.json"]
    before = {name: Path(name).read_bytes() for name in written}
    (workspace / "data/.tmp-raw-dead").mkdir()
    write("mine/train.jsonl", [*GOOD, *BAD])
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "4 of 19 rows cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: Path(name).read_bytes() for name in written} == before
    assert not list(Path("data").glob(".tmp-*"))


STARTER = """
import os, time
from stages.collect import gather
if __name__ == "__main__":
    gather.BYTES_WORTH_WORKERS = 1
    with gather.workers(1) as pool:
        print(pool.submit(os.getpid).result() if pool else 0, flush=True)
        time.sleep(60)
"""


def test_workers_end_with_the_process_that_started_them(workspace):
    """DVC forwards no signal: a killed stage must leave nobody behind."""
    (workspace / "starter.py").write_text(STARTER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(
        [sys.executable, "starter.py"], env=environment, stdout=subprocess.PIPE, text=True
    )
    worker = int(starter.stdout.readline())
    if not worker:
        pytest.skip("one core only: there are no workers")
    starter.kill()
    starter.wait()
    gone_at = time.monotonic() + 10
    while alive(worker):
        assert time.monotonic() < gone_at
        time.sleep(0.1)


def alive(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
