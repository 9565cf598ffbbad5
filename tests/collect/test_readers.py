"""Files of every kind into rows: values written down by hand, never read by our own code first."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from stages.collect import arrays, blocks, readers
from stages.core.errors import UserError

A, B, C = {"text": "first"}, {"text": "second"}, {"text": "third"}


def test_bom_crlf_blank_lines_and_a_missing_last_newline_lose_nothing(run, write):
    """D3: mlx-lm raises JSONDecodeError for a byte-order mark and for a blank line."""
    path = write("a.jsonl", b'\xef\xbb\xbf{"text": "first"}\r\n\r\n  \t\r\n{"text": "second"}')
    found = run(path)
    assert found.records() == [A, B]
    assert found.lines() == [1, 4]
    assert found.report["splits"]["train"]["blank_lines"] == 2
    assert any("2 blank lines" in note and "lines 2, 3" in note for note in found.report["notes"])


def test_a_byte_order_mark_inside_a_file_is_no_part_of_a_row(run, write):
    """`cat a.jsonl b.jsonl`, the second saved with a mark."""
    path = write("a.jsonl", b'{"text": "first"}\n\xef\xbb\xbf{"text": "second"}\n')
    assert run(path).records() == [A, B]


def test_bad_json_on_line_2_of_2_is_named_with_file_line_and_column(run, write):
    """D3."""
    path = write("a.jsonl", '{"text": "first"}\n{"text" "second"}\n')
    with pytest.raises(UserError) as caught:
        run(path)
    assert "1 of 2 rows" in caught.value.what
    assert "data/source/a.jsonl:2:9: not JSON" in caught.value.found


@pytest.mark.parametrize("content", ["", "\n", "\r\n \n\t\n"])
def test_an_empty_file_is_named(run, write, content):
    """D3: mlx-lm says "list index out of range"."""
    with pytest.raises(UserError) as caught:
        run(write("mine/train.jsonl", content))
    assert "data/source/mine/train.jsonl is empty" in caught.value.found


def test_an_empty_file_beside_others_is_named_and_its_split_is_empty(run, write):
    write("mine/train.jsonl", [A])
    write("mine/valid.jsonl", "")
    found = run("data/source/mine")
    assert found.tables["valid"] == []
    assert "data/source/mine/valid.jsonl is empty: it holds no rows" in found.report["notes"]


def test_an_object_over_several_lines_in_a_jsonl_is_one_message(run, write):
    text = json.dumps({"messages": [{"role": "user", "content": "x"}]}, indent=2)
    assert text.count("\n") == 7
    path = write("a.jsonl", f'{{"text": "first"}}\n{text}\n{{"text": "second"}}\n')
    found = run(path, on_bad_row="drop")
    assert found.records() == [A, B]
    assert found.lines() == [1, 10]
    (bad,) = found.report["splits"]["train"]["rejected"]
    assert bad["line"] == 2
    assert "lines 2 to 9" in bad["reason"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_rows_numbered_from_one(run, write, name, indent):
    found = run(write(name, " \n" + json.dumps([A, B, C], indent=indent) + "\n"))
    assert found.records() == [A, B, C]
    assert found.lines() == [1, 2, 3]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_with_a_single_object_is_one_row(run, write, indent):
    assert run(write("a.json", json.dumps(A, indent=indent))).records() == [A]


def test_a_json_file_may_hold_lines_or_objects_one_after_another(run, write):
    lines = "".join(json.dumps(row) + "\n" for row in (A, B))
    objects = "".join(json.dumps(row, indent=1) + "\n" for row in (A, B))
    assert run(write("lines.json", lines)).records() == [A, B]
    assert run(write("objects.json", objects)).records() == [A, B]


def test_a_bad_row_of_an_array_has_its_number_and_its_line_of_the_file(run, write):
    path = write("a.json", '[\n{"text": "first"},\n{"text": ""},\n7,\n{"text": NaN}\n]')
    found = run(path, on_bad_row="drop").report["splits"]["train"]
    reasons = {bad["line"]: bad["reason"] for bad in found["rejected"]}
    assert (found["rows_in"], found["rows_out"]) == (4, 1)
    assert reasons[2] == "text is empty"
    assert reasons[3] == "a number where an object was expected (line 4 of the file)"
    assert "NaN" in reasons[4]
    assert "(line 5 of the file)" in reasons[4]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"text": "a"}', "cut off"),
        ('[{"text": "a"} {"text": "b"}]', "comma is missing"),
        ('[{"text": "a"},]', "Expecting value"),
        ('[{"text": "a"}] x', "behind the array's end"),
        ('[{"text": "a"}, {"text" "b"}]', "Expecting ':'"),
        ('[{"text": "a', "Unterminated string"),
        ("[" + '{"a":' * 3000, "recursion"),
    ],
)
def test_a_torn_array_stops_even_where_bad_rows_are_dropped(run, write, text, found):
    """Nobody could say how many rows are lost behind the break."""
    with pytest.raises(UserError) as caught:
        run(write("a.json", text), on_bad_row="drop")
    assert found in caught.value.found
    assert "data/source/a.json, line 1" in caught.value.where


def test_elements_are_cut_right_wherever_a_block_ends(monkeypatch):
    """Every size must give the same elements: strings with brackets, letters of 4 bytes."""
    rows = [{"text": 'a]},["{' * i + "\\" + "🙂é" * i} for i in range(12)] + [{"n": 12345678901}]
    data = json.dumps(rows, ensure_ascii=False).encode()
    for size in range(1, 40):
        monkeypatch.setattr(arrays, "BLOCK_BYTES", size)
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        found = [json.loads(t) for block in arrays.elements(parts, "x") for t in block.texts]
        assert found == rows


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_lines_are_whole_wherever_a_chunk_ends(monkeypatch, tmp_path, size):
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    lines = [b'{"text": "%d"}' % (10**i) for i in range(20)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = [block for block, _ in readers.blocks(path, "a", readers.forms.Rules())]
    assert b"".join(block.data for block in found) == b"\n".join(lines)
    rows = [row for block in found for row in block.rows()]
    assert rows == [(i + 1, json.loads(line)) for i, line in enumerate(lines)]


def test_compressed_files_are_read(run, write):
    lines = b'{"text": "first"}\n{"text": "second"}\n'
    packed = {
        "a.jsonl.gz": gzip.compress(lines[:18]) + gzip.compress(lines[18:]),
        "b.jsonl.bz2": bz2.compress(lines),
        "c.jsonl.zst": pa.compress(lines, "zstd", asbytes=True),
        "d.csv.gz": gzip.compress(b"text\nfirst\nsecond\n"),
    }
    for name, data in packed.items():
        assert run(write(name, data)).records() == [A, B], name


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20]),
        ("a.jsonl.gz", b"no gzip at all"),
        ("a.jsonl.zst", b"no zstd at all"),
        ("a.parquet", b"PAR1 but nothing else"),
        ("a.parquet", b""),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16")),
        ("a.csv", "text\na\n".encode("utf-16")),
    ],
    ids=["torn gzip", "gzip", "zstd", "parquet", "empty parquet", "jsonl", "csv"],
)
def test_a_damaged_file_is_named_without_a_traceback(run, write, name, data):
    with pytest.raises(UserError) as caught:
        run(write(name, data), on_bad_row="drop")
    assert f"data/source/{name}" in str(caught.value)


def test_csv_keeps_every_field_as_the_text_it_is(run, write):
    """pandas would make numbers, nulls and dates of these; lines count as editors do."""
    values = ["007", "1e5", "NULL", "NaN", "true", " 2024-01-02 ", 'say "hi"', "a,b", "two\nlines"]
    quoted = ['"' + value.replace('"', '""') + '"' for value in values]
    text = "\ufeffprompt,response\r\n" + "".join(f"q{i},{v}\r\n" for i, v in enumerate(quoted))
    found = run(write("a.csv", text + "q9,last"))
    expected = [{"prompt": f"q{i}", "completion": v} for i, v in enumerate([*values, "last"])]
    assert found.records() == expected
    assert found.lines() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    assert found.report["mapping"][0]["mapping"] == "prompt → prompt, response → completion"


def test_csv_rows_that_do_not_fit_the_header_are_refused_by_line(run, write):
    text = 'text,more\nfine,x\nshort\n\n"a"b,x\nlong,x,y\n\udcff,x\n'
    path = write("a.csv", text.encode("utf-8", "surrogateescape"))
    found = run(path, on_bad_row="drop").report["splits"]["train"]
    assert [(bad["line"], bad["reason"]) for bad in found["rejected"]] == [
        (3, "1 field, the header names 2"),
        (5, "not CSV: ',' expected after '\"'"),
        (6, "3 fields, the header names 2"),
        (7, "not UTF-8"),
    ]
    assert (found["rows_in"], found["rows_out"], found["blank_lines"]) == (5, 1, 1)


def test_a_quote_that_is_never_closed_stops(run, write):
    """It would swallow the rest of the file as one field."""
    with pytest.raises(UserError) as caught:
        run(write("a.csv", 'text\nfine\n"open\nlost\nlost\n'), on_bad_row="drop")
    assert caught.value.where == "data/source/a.csv, line 3"


def test_tsv_and_parquet_give_the_same_rows_as_csv(run, write, workspace):
    table = pa.table({"question": ["q1", "q2"], "answer": ["a1", "a2"], "id": [7, 8]})
    expected = [{"prompt": "q1", "completion": "a1"}, {"prompt": "q2", "completion": "a2"}]
    write("x", "")
    pq.write_table(table, workspace / "data/source/a.parquet")
    pa.csv.write_csv(table, workspace / "data/source/a.csv")
    options = pa.csv.WriteOptions(delimiter="\t")
    pa.csv.write_csv(table, workspace / "data/source/a.tsv", options)
    for name, lines in (("a.csv", [2, 3]), ("a.tsv", [2, 3]), ("a.parquet", [1, 2])):
        found = run(f"data/source/{name}")
        assert found.records() == expected, name
        assert found.lines() == lines


def test_parquet_chats_with_nulls_in_them(run, write, workspace):
    """Arrow fills keys that a turn does not have with null: they are no keys of that turn."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "name": "b"}]
    table = pa.table({"messages": [turns], "tools": pa.array([None], pa.string())})
    write("x", "")
    pq.write_table(table, workspace / "data/source/a.parquet")
    assert run("data/source/a.parquet").records() == [{"messages": turns}]


def test_parquet_rows_that_are_not_utf8_are_refused_alone(run, write, workspace):
    raw = pa.array([b"fine", b"\xff\xfe", b"also"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    write("x", "")
    pq.write_table(pa.table({"text": text}), workspace / "data/source/a.parquet")
    found = run("data/source/a.parquet", on_bad_row="drop")
    assert found.records() == [{"text": "fine"}, {"text": "also"}]
    assert found.report["splits"]["train"]["rejected"][0]["line"] == 2


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("prompt,response,completion", "'completion', 'response' could each be the answer"),
        ("prompt,question,answer", "'prompt', 'question' could each be the prompt"),
        ("question,context,answer", "'question', 'context' could each be the prompt"),
        ("messages,prompt,completion", "completion, messages, prompt fit two forms"),
        ("colour,shape", "colour, shape fit no form"),
        ("text,text", "text"),
    ],
)
def test_columns_that_do_not_say_what_they_are_stop_and_are_named(run, write, header, found):
    """D11."""
    with pytest.raises(UserError) as caught:
        run(write("a.csv", header + "\n" + ",".join("x" * len(header.split(","))) + "\n"))
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("name", "mark"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", ",")]
)
def test_a_table_with_another_separator_is_told_so(run, write, name, mark):
    """Spreadsheets of half of Europe write semicolons into what they call CSV."""
    with pytest.raises(UserError, match="not told apart") as caught:
        run(write(name, f"prompt{mark}completion\nq{mark}a\n"))
    assert caught.value.where == f"data/source/{name}, line 1"
    assert f"prompt{mark}completion" in caught.value.found.replace("\\t", "\t")


def test_columns_that_differ_in_spelling_only_are_named_in_the_remedy(run, write):
    path = write("a.csv", " Prompt , COMPLETION \nq,a\n")
    with pytest.raises(UserError) as caught:
        run(path)
    remedy = "data.columns={prompt: Prompt, completion: COMPLETION}"
    assert caught.value.fix.endswith(remedy)
    found = run(path, columns={"prompt": "Prompt", "completion": "COMPLETION"})
    assert found.records() == [{"prompt": "q", "completion": "a"}]


def test_blocks_are_small_whatever_the_file(tmp_path, monkeypatch):
    """D12: what is held does not grow with the file; a long line is the only exception."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "0123456789"}\n' * 5000)
    sizes = [len(block.data) for block, _ in readers.blocks(path, "a", readers.forms.Rules())]
    assert sum(sizes) == path.stat().st_size
    assert max(sizes) <= 2000
    assert blocks.BLOCK_BYTES <= 4_000_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "first"}\r{"text": "second"}\r'),
        ("a.csv", b'prompt,completion\r"q",a\r'),
    ],
)
def test_lines_that_end_with_a_carriage_return_alone_are_said(run, write, name, content):
    with pytest.raises(UserError, match="line endings") as caught:
        run(write(name, content))
    assert "carriage return alone" in caught.value.found
    assert "LF" in caught.value.fix


def test_a_carriage_return_inside_a_row_is_no_line_ending(run, write):
    assert run(write("a.jsonl", b'{"text":\r"first"}\r')).records() == [A]
