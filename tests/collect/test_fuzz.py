"""Readers against arbitrary input: never a traceback, never a lost row."""

import csv
import io
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.collect import collect as stage
from stages.collect import forms
from stages.core import console, files
from stages.core.config.schema import Data, Shares
from stages.core.errors import UserError

NAMES = ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.json.zst", "a.parquet")
KINDS = ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "chats.parquet")

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", " ", "[]", "{}", '{"name": "f", "arguments": "{}"}', "\ud800", "{{x}}"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
ROLES = st.sampled_from(
    ["user", "assistant", "system", "tool", "human", "gpt", "function_call", "x"]
)
TURN_KEYS = (
    "content",
    "value",
    "tool_calls",
    "function_call",
    "name",
    "weight",
    "reasoning_content",
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "reasoning", "tool_call", "image_url", "x"])},
        optional={"text": JSON, "value": JSON},
    ),
    max_size=3,
)
CONTENT = st.text(max_size=5) | PARTS | JSON
EXTRA = {key: JSON | st.text(max_size=5) for key in TURN_KEYS}
NEARLY = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": CONTENT}
) | st.fixed_dictionaries(
    {"from": st.sampled_from(["human", "gpt", "function_call"]), "value": CONTENT}
)
WILD = st.fixed_dictionaries({}, optional={"role": ROLES | JSON, "from": ROLES, **EXTRA})
TURNS = st.lists(NEARLY | WILD, max_size=4)
ROWS = st.dictionaries(st.sampled_from(forms.KNOWN), TURNS | st.text(max_size=6) | JSON, max_size=5)
CHATS = st.fixed_dictionaries({"messages": TURNS}, optional={"tools": JSON, "system": JSON})
VALUES = st.lists(ROWS | CHATS | JSON, min_size=1, max_size=8)


def collected(name: str, data: bytes | None, table: pa.Table | None = None) -> dict | None:
    """The report on train, or None where the input was refused as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if table is not None:
            pq.write_table(table, path)
        else:
            path.write_bytes(data or b"")
        shares = Shares(train=1, valid=0, test=0)
        out = Path(folder) / "out"
        out.mkdir()
        try:
            report = stage.collect(Data(path=str(path), on_bad_row="drop", shares=shares), out)
        except UserError as error:
            assert error.what
            return None
        rows = pq.read_table(out / "train.parquet")
        assert rows.num_rows == report["splits"]["train"]["rows_out"]
        for record in rows["record"].to_pylist():
            json.loads(record).keys()
        json.dumps(report, allow_nan=False)
        return report["splits"]["train"]


def nothing_lost(split: dict | None) -> None:
    """Every row came out, or stands in the list of refused ones with a reason and a line."""
    if split is not None:
        assert split["rows_in"] == split["rows_out"] + len(split["rejected"])
        assert all(entry["reason"] and entry["line"] >= 1 for entry in split["rejected"])


def check_bytes(name: str, data: bytes) -> None:
    nothing_lost(collected(name, data))


def check_values(name: str, values: list) -> None:
    """Each value is one row of its file, beside a good one, so that no file is refused whole."""
    lines = [json.dumps(value) for value in values]
    table = None
    if name == "a.jsonl":
        text = "\n".join(['{"text": "good"}', *lines])
    elif name == "a.json":
        text = "[" + ", ".join(['{"text": "good"}', *lines]) + "]"
    else:
        texts = ["good", *(line.encode("utf-8", "replace").decode() for line in lines)]
        table = pa.table({"prompt": texts, "response": ["good", *texts[:0:-1]]})
        if name == "chats.parquet":
            good = '[{"role": "assistant", "content": "good"}]'
            table = pa.table({"messages": [good, *texts[1:]]})
        written = io.StringIO()
        writer = csv.writer(written, delimiter="\t" if name == "a.tsv" else ",")
        writer.writerows([table.column_names, *(row.values() for row in table.to_pylist())])
        text = written.getvalue()
    split = collected(name, text.encode(), table if name.endswith("parquet") else None)
    assert split is not None
    assert split["rows_in"] == len(values) + 1
    nothing_lost(split)


def check_damage(name: str, values: list, cut: int, junk: bytes) -> None:
    """Good lines with bytes put in or taken out anywhere."""
    data = "\n".join(json.dumps(value, ensure_ascii=False) for value in values)
    data = data.encode("utf-8", "surrogatepass")
    at = cut % (len(data) + 1)
    nothing_lost(collected(name, data[:at] + junk + data[at + len(junk) // 2 :]))


RAW = st.binary(max_size=200) | st.text(alphabet='{}[]",:\\ \n\r\t0eau', max_size=80).map(
    str.encode
)
QUICK = settings(max_examples=25, deadline=None)
LONG = settings(
    max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Tables on the terminal and waiting for the disk would be the slowest parts."""
    patch = pytest.MonkeyPatch()
    for name in ("say", "warn", "table"):
        patch.setattr(console, name, lambda *_: None)
    patch.setattr(files, "sync", lambda _: None)
    yield
    patch.undo()


@QUICK
@given(st.sampled_from(NAMES), RAW)
def test_any_bytes(name, data):
    check_bytes(name, data)


@QUICK
@given(st.sampled_from(KINDS), VALUES)
def test_any_json(name, values):
    check_values(name, values)


@QUICK
@given(st.sampled_from(NAMES[:4]), VALUES, st.integers(0, 10_000), st.binary(max_size=4))
def test_any_damage(name, values, cut, junk):
    check_damage(name, values, cut, junk)


@pytest.mark.slow
@LONG
@given(st.sampled_from(NAMES), RAW)
def test_any_bytes_long(name, data):
    check_bytes(name, data)


@pytest.mark.slow
@LONG
@given(st.sampled_from(KINDS), VALUES)
def test_any_json_long(name, values):
    check_values(name, values)


@pytest.mark.slow
@settings(LONG, max_examples=500)
@given(st.sampled_from(NAMES[:4]), VALUES, st.integers(0, 10_000), st.binary(max_size=4))
def test_any_damage_long(name, values, cut, junk):
    check_damage(name, values, cut, junk)
