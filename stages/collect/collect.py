"""Rows from wherever they are into `data/raw`: the whole of the stage.

Splits without a file of their own are cut from train by `data.shares`, by content and seed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from stages.collect import copies, docstrings, forms, gather, hub, location, report, sources
from stages.collect.gather import Gathered
from stages.collect.sources import Source
from stages.core import console, paths
from stages.core.config.schema import Data
from stages.core.config.settings import nearest
from stages.core.errors import UserError
from stages.core.tables import SPLITS


def collect(data: Data, folder: Path) -> dict[str, Any]:
    """Write `train.parquet`, `valid.parquet` and `test.parquet` to a folder.

    Args:
        data: The settings `data.*`.
        folder: Where to write; it exists.

    Returns:
        The report, see `stages.collect.report`.

    Raises:
        UserError: There is no data, a file cannot be read, or rows cannot be used (all are listed).
    """
    rules = rules_of(data)
    if data.path == docstrings.PATH:
        read, said = _corpus(rules, folder), []
    else:
        read, said = _files(data, rules, folder)
    if data.on_bad_row == "error":
        report.refuse_bad_rows(read)
    if not read["train"].rows_out:
        raise UserError(
            "No row of train is left",
            where=", ".join(read["train"].names) or str(data.path),
            found=f"{read['train'].rejected_rows} refused, 0 kept",
            expected="at least one row that can be used",
            fix="run with data.on_bad_row=error to see what is wrong with each row",
        )
    splits, cuts = _cut(read, data, folder)
    found = report.build(splits, read)
    lines = [*said, *cuts, *report.sentences(read), *_dropped(read)]
    found["notes"] = [line for line, _ in lines]
    report.show(found)
    for line, loud in lines:
        (console.warn if loud else console.say)(line)
    return found


def rules_of(data: Data) -> forms.Rules:
    """What the settings say about forms.

    Raises:
        UserError: `data.columns` names a slot that does not exist.
    """
    columns = data.columns or {}
    for slot in columns:
        if slot not in forms.SLOTS:
            raise UserError(
                f"data.columns has no slot {slot}",
                where="data.columns",
                found=slot,
                expected=", ".join(forms.SLOTS),
                fix=f"nearest: {nearest(slot, forms.SLOTS)}" if nearest(slot, forms.SLOTS) else "",
            )
    return forms.Rules(data.format, tuple(columns.items()))


def _corpus(rules: forms.Rules, folder: Path) -> dict[str, Gathered]:
    read = {}
    for split, blocks in docstrings.rows(paths.here() / "pyproject.toml").items():
        stream = ((Source(Path(name), name), block, 0) for name, block in blocks)
        out = folder / f"{split}.parquet"
        read[split] = gather.gather(stream, rules, out, None, (f"collect {split}", 0))
    return read


def _files(
    data: Data, rules: forms.Rules, folder: Path
) -> tuple[dict[str, Gathered], list[tuple[str, bool]]]:
    """Read files of one's own, or of the Hub."""
    if data.path and data.path.startswith(hub.PREFIX):
        path, label, warnings = hub.fetch(data.path), data.path, []
    else:
        path, warnings = location.locate(data.path)
        label = _label(path, data.path)
    found = sources.discover(path, label)
    splits = {name: found.splits[name] for name in SPLITS if name in found.splits}
    sizes = {name: _size(files) for name, files in splits.items()}
    read = {}
    with gather.workers(sum(sizes.values())) as pool:
        for split, files in splits.items():
            stream = gather.files_as_stream(files, rules)
            progress = (f"collect {split}", sizes[split])
            out = folder / f"{split}.parquet"
            read[split] = gather.gather(stream, rules, out, pool, progress)
    empty = [
        f"{source.name} is empty: it holds no rows"
        for split, files in splits.items()
        for source in files
        if not read[split].rows_of.get(source.name)
    ]
    if not any(gathered.rows_in for gathered in read.values()) or not read["train"].rows_in:
        raise UserError(
            "There are no rows",
            where=label,
            found="; ".join(empty),
            expected="at least one row for train",
            fix="fill the file, or point data.path elsewhere",
        )
    said = [(line, True) for line in (*warnings, *found.warnings, *empty)]
    beside = ", ".join(found.unread[: sources.MOST_NAMED])
    return read, said + ([(f"beside them, not read: {beside}", False)] if beside else [])


def _label(path: Path, given: str | None) -> str:
    """The name of a path in messages and tables: never one of this machine."""
    try:
        return path.resolve().relative_to(paths.here().resolve()).as_posix()
    except ValueError:
        return path.name if given is None or Path(given).is_absolute() else Path(given).as_posix()


def _size(files: list[Source]) -> int:
    return sum(source.path.stat().st_size for source in files)


def _cut(
    read: dict[str, Gathered], data: Data, folder: Path
) -> tuple[dict[str, Gathered], list[tuple[str, bool]]]:
    """Give splits without a file their share of train, and say so."""
    shares = {"valid": data.shares.valid, "test": data.shares.test}
    missing = {name: share for name, share in shares.items() if name not in read}
    splits = dict(read)
    if any(missing.values()):
        split_of = copies.cut(read["train"].digests, missing, data.seed)
        whole = folder / "whole.parquet"
        shutil.move(folder / "train.parquet", whole)
        gather.route(whole, split_of, folder)
        for name in missing:
            splits[name] = read["train"].part(split_of == SPLITS.index(name))
        splits["train"] = _rest(read["train"], split_of == 0)
    for name in missing:
        splits.setdefault(name, Gathered())
        if not (folder / f"{name}.parquet").exists():
            gather.write_empty(folder / f"{name}.parquet")
    return splits, [_cut_line(name, splits[name], read["train"], data) for name in missing]


def _rest(train: Gathered, chosen: Any) -> Gathered:
    """Train without the rows that were cut off; the refused rows stay its own."""
    rest = train.part(chosen)
    rest.rows_in += train.rejected_rows
    rest.rejected, rest.rejected_rows = train.rejected, train.rejected_rows
    rest.blank = train.blank
    return rest


def _cut_line(name: str, part: Gathered, train: Gathered, data: Data) -> tuple[str, bool]:
    """How a split without a file came about, and whether it should be read."""
    share = getattr(data.shares, name)
    if share == 0:
        return f"there is no {name} file and data.shares.{name} is 0: {name} is empty", True
    line = (
        f"there is no {name} file: {name} takes {part.rows_out} of train's {train.rows_out} rows"
        f" (data.shares.{name}={share:g}, drawn by content and data.seed={data.seed}; equal rows"
        " stay together)"
    )
    if share * train.rows_out >= 1:
        return line, False
    return f"{line}: {train.rows_out} rows are too few for a share of {share:g}", True


def _dropped(read: dict[str, Gathered]) -> list[tuple[str, bool]]:
    return [
        (f"dropped from {name}: {gathered.rejected_rows} rows (data.on_bad_row=drop)", True)
        for name, gathered in read.items()
        if gathered.rejected_rows
    ]
