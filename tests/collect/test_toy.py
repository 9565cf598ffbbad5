"""The toy rows: every form, no repeats, no leak."""

import shutil
from pathlib import Path

TOY = Path(__file__).resolve().parents[2] / "data/source/toy"


def test_toy_is_48_8_and_8_short_rows_of_every_kind(run, workspace):
    shutil.copytree(TOY, workspace / "data/source/toy")
    found = run("data/source/toy")
    sizes = {name: len(table) for name, table in found.tables.items()}
    assert sizes == {"train": 48, "valid": 8, "test": 8}
    for name, table in found.tables.items():
        assert {row["kind"] for row in table} == {"text", "completion", "chat"}, name
        assert found.report["splits"][name]["duplicates"] == []
        assert found.report["splits"][name]["characters"] < 60 * len(table)
    assert found.report["leaks"] == []
    assert found.report["notes"] == []
