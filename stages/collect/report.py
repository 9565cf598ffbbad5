"""What collect says: the report, the list of bad rows, and the tables a person sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.collect import copies, notes
from stages.collect.gather import MOST_LISTED, Gathered
from stages.core import console, files, paths
from stages.core.errors import UserError
from stages.core.tables import SPLITS

BAD_ROWS_SHOWN = 20


def refuse_bad_rows(found: dict[str, Gathered]) -> None:
    """Stop where rows were refused, naming the first ones; the whole list goes to a file.

    Raises:
        UserError: There are bad rows.
    """
    bad = [entry for gathered in found.values() for entry in gathered.rejected]
    count = sum(gathered.rejected_rows for gathered in found.values())
    if not count:
        return
    rows = sum(gathered.rows_in for gathered in found.values())
    whole = paths.cache() / "bad_rows.json"
    files.write_json(whole, {"rows": rows, "bad_rows": count, "listed": bad})
    shown = [_place(entry) for entry in bad[:BAD_ROWS_SHOWN]]
    if count > len(shown):
        shown.append(f"… and {count - len(shown)} more")
    raise UserError(
        f"{count} of {rows} rows cannot be used",
        where=", ".join(dict.fromkeys(entry["source"] for entry in bad[:BAD_ROWS_SHOWN])),
        found="".join(f"\n    {line}" for line in shown),
        expected="rows of one of the forms in data/source/README.md",
        fix=f"mend them (the whole list: {_short(whole)}), or leave them out with"
        " data.on_bad_row=drop",
    )


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(paths.here()))
    except ValueError:
        return str(path)


def _place(entry: dict[str, Any]) -> str:
    column = f":{entry['column']}" if entry["column"] else ""
    return f"{entry['source']}:{entry['line']}{column}: {entry['reason']}"


def build(splits: dict[str, Gathered], read: dict[str, Gathered]) -> dict[str, Any]:
    """The report on what is in the tables.

    Args:
        splits: train, valid and test as they were written.
        read: The sets of files they were read from (the same, where nothing was cut).
    """
    train = splits["train"]
    leaks = {name: copies.leaks(train.digests, splits[name].digests) for name in ("valid", "test")}
    mapping = [
        {"files": name, "form": form, "rows": rows, "mapping": how}
        for name, gathered in read.items()
        for (form, how), rows in sorted(gathered.mapping.items())
    ]
    return {
        "splits": {name: _split(splits[name]) for name in SPLITS},
        "leaks": [
            _leak(train, splits[name], name, *pair)
            for name, pairs in leaks.items()
            for pair in pairs[:MOST_LISTED]
        ],
        "leaked_rows": {name: len(pairs) for name, pairs in leaks.items()},
        "mapping": mapping,
    }


def _split(gathered: Gathered) -> dict[str, Any]:
    repeats = copies.repeats(gathered.digests)
    return {
        "rows_in": gathered.rows_in,
        "rows_out": gathered.rows_out,
        "rejected": gathered.rejected,
        "rejected_rows": gathered.rejected_rows,
        "duplicates": [_repeat(gathered, *pair) for pair in repeats[:MOST_LISTED]],
        "duplicate_rows": len(repeats),
        "blank_lines": sum(note.rows for note in gathered.blank.values()),
        "characters": int(gathered.characters.sum()),
        "tokens": None,
        "targets": None,
    }


def _repeat(gathered: Gathered, row: int, first: int) -> dict[str, Any]:
    here, there = gathered.where(row), gathered.where(first)
    return {**here, "same_as": there["line"], "same_as_source": there["source"]}


def _leak(train: Gathered, other: Gathered, name: str, row: int, first: int) -> dict[str, Any]:
    there = train.where(first)
    leak = {"train_source": there["source"], "train_line": there["line"]}
    return {"split": name, **other.where(row), **leak}


def sentences(read: dict[str, Gathered]) -> list[tuple[str, bool]]:
    """Everything worth saying about the rows of all files, and whether to warn of it."""
    found = []
    for gathered in read.values():
        found += [(line, False) for line in notes.blank(gathered.blank)]
        found += notes.sentences(gathered.notes)
    return found


def show(report: dict[str, Any]) -> None:
    """Print the mapping used, the counts and the notes."""
    console.table(
        "Mapping",
        ["files", "form", "rows", "columns"],
        [[m["files"], m["form"], m["rows"], m["mapping"]] for m in report["mapping"]],
    )
    leaked = {"train": "", **report["leaked_rows"]}
    console.table(
        "Rows",
        ["split", "read", "kept", "refused", "repeats", "also in train"],
        [
            [
                name,
                s["rows_in"],
                s["rows_out"],
                s["rejected_rows"],
                s["duplicate_rows"],
                leaked[name],
            ]
            for name, s in report["splits"].items()
        ],
    )
