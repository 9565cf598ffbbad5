"""The whole stage on small tables: examples, counts, refusals; against plain Python."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.core import tables
from stages.core.config.schema import Split
from stages.core.errors import UserError
from stages.split import picture
from stages.split.work import split


def write_tokens(folder, **splits):
    """Rows are (tokens, mask) or (tokens, mask, starts, system_end, end)."""
    (folder / "turns").mkdir(parents=True, exist_ok=True)
    for name in tables.SPLITS:
        rows = [(*row, [], 0, len(row[0]) - 1)[:5] for row in splits.get(name, [])]
        count = len(rows)
        columns = {
            "row": list(range(count)),
            "tokens": [row[0] for row in rows],
            "target_mask": [row[1] for row in rows],
        }
        side = {
            "row": list(range(count)),
            "line": [10 * (i + 1) for i in range(count)],
            "source": ["a.jsonl"] * count,
            "starts": [row[2] for row in rows],
            "system_end": [row[3] for row in rows],
            "end": [row[4] for row in rows],
        }
        for path, schema, table in (
            (folder / f"{name}.parquet", tables.TOKENS, columns),
            (folder / "turns" / f"{name}.parquet", tables.TURNS, side),
        ):
            with tables.writing(path, schema) as writer:
                writer.write_table(pa.table(table, schema))


def text(length, start=0):
    return list(range(start, start + length)), [False] + [True] * (length - 1)


def run(folder, cap=8, **more):
    report, lengths = split(
        folder / "tokens", folder / "examples", Split(max_seq_length=cap, **more)
    )
    batches = tables.batches(folder / "examples" / "train.parquet")
    return report, lengths, [row for batch in batches for row in batch.to_pylist()]


def test_short_rows_pass_as_they_are(tmp_path):
    rows = [text(5), text(8, 100), ([7, 8, 9], [False, False, True])]
    write_tokens(tmp_path / "tokens", train=rows)
    report, lengths, examples = run(tmp_path)
    assert [(e["tokens"], e["target_mask"]) for e in examples] == rows
    assert [e["example"] for e in examples] == [0, 1, 2]
    assert [e["row"] for e in examples] == [0, 1, 2]
    counts = report["splits"]["train"]
    assert (counts["tokens"], counts["targets"], counts["targets_lost"]) == (16, 12, 0)
    assert lengths["train"].tolist() == [5, 8, 3]
    assert report["splits"]["valid"]["examples"] == 0
    assert tables.rows(tmp_path / "examples" / "valid.parquet") == 0


def test_long_rows_become_pieces(tmp_path):
    write_tokens(tmp_path / "tokens", train=[text(20), text(3, 100)])
    report, _, examples = run(tmp_path)
    # 19 targets at 7 a piece; each later piece begins with the last token of the one before.
    assert [e["tokens"] for e in examples] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [7, 8, 9, 10, 11, 12, 13, 14],
        [14, 15, 16, 17, 18, 19],
        [100, 101, 102],
    ]
    assert all(e["target_mask"] == [False] + [True] * (len(e["tokens"]) - 1) for e in examples)
    assert [(e["row"], e["piece"]) for e in examples] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    counts = report["splits"]["train"]
    assert counts["rows_split"] == counts["rows_over"] == 1
    assert (counts["targets"], counts["end_tokens_lost"], counts["longest"]) == (21, 0, 8)


def test_the_system_prompt_is_repeated_as_context(tmp_path):
    mask = [False] * 4 + [True] * 3 + [False] * 2 + [True] * 3
    write_tokens(tmp_path / "tokens", train=[(list(range(12)), mask, [7], 2, 11)])
    _, _, examples = run(tmp_path)
    assert [e["tokens"] for e in examples] == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 7, 8, 9, 10, 11]]
    assert examples[1]["target_mask"] == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("policy", "kept", "lost", "ends", "truncated", "dropped"),
    [
        ("truncate_end", [[0, 1, 2, 3, 4, 5, 6, 7]], 12, 1, 1, 0),
        ("truncate_start", [[12, 13, 14, 15, 16, 17, 18, 19]], 12, 0, 1, 0),
        ("keep_completion", [[0, 1, 2, 3, 4, 5, 6, 7]], 12, 1, 1, 0),
        ("drop", [], 19, 1, 0, 1),
    ],
)
def test_what_policies_lose(tmp_path, policy, kept, lost, ends, truncated, dropped):
    write_tokens(tmp_path / "tokens", train=[text(20), text(4, 100)])
    report, _, examples = run(tmp_path, policy=policy)
    assert [e["tokens"] for e in examples] == [*kept, [100, 101, 102, 103]]
    counts = report["splits"]["train"]
    assert counts["targets_lost"] == lost
    assert counts["end_tokens_lost"] == ends
    assert counts["rows_truncated"] == truncated
    assert counts["rows_dropped"] == len(counts["rejected"]) == dropped
    assert counts["targets"] + counts["targets_lost"] == counts["targets_in"] == 22


def test_a_prompt_longer_than_the_cap(tmp_path):
    """G9: the answer lies behind the cap: kept by `split`, named and left out by `truncate_end`."""
    mask = [False] * 15 + [True] * 5
    write_tokens(tmp_path / "tokens", train=[(list(range(20)), mask)])
    _, _, examples = run(tmp_path)
    assert [e["tokens"] for e in examples] == [list(range(12, 20))]
    report, _, examples = run(tmp_path, policy="truncate_end")
    assert examples == []
    rejected = report["splits"]["train"]["rejected"]
    assert [(row["source"], row["line"]) for row in rejected] == [("a.jsonl", 10)]
    assert "no target" in rejected[0]["reason"]


def test_policy_error_names_all_long_rows_of_all_splits(tmp_path):
    write_tokens(tmp_path / "tokens", train=[text(20), text(4), text(9)], test=[text(30)])
    with pytest.raises(UserError) as caught:
        run(tmp_path, policy="error")
    for line in ("line 10: 20 tokens", "line 30: 9 tokens", "line 10: 30 tokens"):
        assert line in caught.value.found
    assert "split.max_seq_length to 30" in caught.value.fix
    assert not (tmp_path / "examples").exists()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_targets_of_a_whole_table(tmp_path_factory, data):
    """Tokens are unique here, so that each target can be counted over all pieces."""
    folder = tmp_path_factory.mktemp("table")
    rows, at = [], 0
    for _ in range(data.draw(st.integers(0, 6))):
        length = data.draw(st.integers(1, 40))
        mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
        rows.append((list(range(at, at + length)), [False, *mask[1:]]))
        at += length
    cap = data.draw(st.integers(2, 20))
    overlap = data.draw(st.integers(0, max(0, cap - 2)))
    write_tokens(folder / "tokens", train=rows)
    report, _, examples = run(folder, cap=cap, overlap=overlap)
    expected = [t for tokens, mask in rows for t, flag in zip(tokens, mask, strict=True) if flag]
    found = [
        t for e in examples for t, flag in zip(e["tokens"], e["target_mask"], strict=True) if flag
    ]
    assert found == expected
    assert all(1 < len(e["tokens"]) <= cap and not e["target_mask"][0] for e in examples)
    assert all(any(e["target_mask"]) for e in examples)
    assert [e["example"] for e in examples] == list(range(len(examples)))
    assert report["splits"]["train"]["targets_lost"] == 0


def test_tables_that_do_not_belong_together(tmp_path):
    write_tokens(tmp_path / "tokens", train=[text(4), text(5)])
    write_tokens(tmp_path / "other", train=[text(4)])
    side = tmp_path / "tokens" / "turns" / "train.parquet"
    side.write_bytes((tmp_path / "other" / "turns" / "train.parquet").read_bytes())
    with pytest.raises(UserError, match="do not belong together"):
        run(tmp_path)


def test_picture(tmp_path):
    lengths = {"train": np.array([5, 50, 5000]), "valid": np.zeros(0, np.int32)}
    for name in ("a", "b"):
        picture.draw(tmp_path / f"{name}.png", lengths, 64)
    first, second = ((tmp_path / f"{name}.png").read_bytes() for name in ("a", "b"))
    assert first.startswith(b"\x89PNG")
    assert first == second
    picture.draw(tmp_path / "empty.png", {"train": np.zeros(0, np.int32)}, 64)


def test_an_edit_of_split_needs_no_tokenizer():
    """The stage's code imports neither transformers nor MLX."""
    import subprocess
    import sys

    code = (
        "import sys, stages.split.__main__, stages.split.work, stages.split.picture\n"
        "print([name for name in ('mlx', 'transformers', 'tokenizers', 'matplotlib')"
        " if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.replace("'", '"')) == []
