"""Which files hold the rows, and which split each belongs to, by the names people use.

A split's name is the first or the last word of a file's name (`train-00000-of-00002.parquet`,
`wiki.val.jsonl`, `test_1.csv`), or the name of the folder that a file lies in. A folder whose
files name no split is one set and cut by `data.shares`, like a single file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from stages.collect.readers import CODECS, format_of
from stages.core.errors import UserError, listed

NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "eval": "valid",
    "test": "test",
    "testing": "test",
}
MOST_NAMED = 12
SHARD = re.compile(r"(.+)-(\d+)-of-(\d{1,6})(?:-[0-9a-f]{16})?")
"""`train-00000-of-00003`, as `datasets` names them; its older releases put a hash behind."""


@dataclass(frozen=True)
class Source:
    """One file: its path, and the name it has in messages and tables."""

    path: Path
    name: str


@dataclass
class Sources:
    """The files of each split; `train` alone where everything is one set.

    Attributes:
        splits: Split → its files in reading order.
        unread: Files beside them that are not read.
        warnings: What a person should know.
    """

    splits: dict[str, list[Source]]
    unread: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def discover(path: Path, label: str) -> Sources:
    """Find the files of a folder, or take a single file, and give each its split.

    Args:
        path: The folder or file.
        label: What to put before the files' names (the path below the root, or a Hub name).

    Raises:
        UserError: No file with rows; two names for one split; no train file beside others.
    """
    if path.is_file():
        if format_of(path) is None:
            raise _no_files(label, [path.name])
        return Sources({"train": [Source(path, label)]})
    found, unread = _files(path)
    if not found:
        return _in_subfolders(path, label, unread)
    _same_name_twice(found, label)
    words = {file: _split_words(file) for file in found}
    named = [file for file in found if words[file]]
    _all_shards(named or found, label)
    sources = Sources({}, [_name(label, file.name) for file in unread], _beside(path))
    if not named:
        sources.splits["train"] = [Source(file, _name(label, file.name)) for file in found]
        if len(found) > 1:
            listed = ", ".join(file.name for file in found[:MOST_NAMED])
            sources.warnings.append(f"no file is named after a split: one set of {listed}")
        return sources
    for file in found:
        if not words[file]:
            sources.unread.append(_name(label, file.name))
            sources.warnings.append(f"{file.name} is not read: its name says no split")
            continue
        split = _split_of(file, words[file], label)
        sources.splits.setdefault(split, []).append(Source(file, _name(label, file.name)))
    _one_word_each(named, words, label)
    _with_train(sources, label)
    return sources


def _in_subfolders(path: Path, label: str, unread: list[Path]) -> Sources:
    """Take folders named after splits, or the only folder that holds files."""
    folders = [entry for entry in _visible(path) if entry.is_dir()]
    filled = [
        folder for folder in folders if any(_files(sub)[0] for sub in [folder, *_deep(folder)])
    ]
    named = {folder: NAMES.get(folder.name.lower()) for folder in filled}
    if not filled:
        raise _no_files(label, [file.name for file in unread])
    if len(filled) == 1 and not named[filled[0]]:
        return discover(filled[0], _name(label, filled[0].name))
    if not all(named.values()) or len(set(named.values())) < len(filled):
        raise UserError(
            "Several folders hold data",
            where=label,
            found=", ".join(folder.name for folder in filled[:MOST_NAMED]),
            expected="folders named train, valid and test, or one of these",
            fix=f"data.path={_name(label, filled[0].name)}",
        )
    sources = Sources({}, [_name(label, file.name) for file in unread])
    for folder, split in named.items():
        files, beside = _files(folder)
        prefix = _name(label, folder.name)
        if not files:
            raise _no_files(prefix, [file.name for file in beside])
        _all_shards(files, prefix)
        sources.splits[split] = [Source(file, _name(prefix, file.name)) for file in files]
        sources.unread += [_name(prefix, file.name) for file in beside]
        sources.warnings += _beside(folder)
    _with_train(sources, label)
    return sources


def _beside(folder: Path) -> list[str]:
    """Say which folders with rows lie beside the files that are read."""
    folders = [entry for entry in _visible(folder) if entry.is_dir()]
    return [
        f"{inner.name}/ is not read: files lie beside it in {folder.name}/"
        for inner in folders
        if any(_files(sub)[0] for sub in [inner, *_deep(inner)])
    ]


def _visible(folder: Path) -> list[Path]:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return sorted(entries, key=lambda entry: _natural(entry.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """Order `part_2` before `part_10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _deep(folder: Path) -> list[Path]:
    return [entry for entry in folder.rglob("*") if entry.is_dir()]


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that hold rows, and those that do not."""
    entries = _visible(folder)
    _all_readable(entries)
    files = [entry for entry in entries if entry.is_file()]
    return [file for file in files if format_of(file)], [
        file for file in files if not format_of(file)
    ]


def _all_readable(entries: list[Path]) -> None:
    """Refuse a link to nothing, or a pipe, where a file's name promises rows."""
    for entry in entries:
        if format_of(entry) and not entry.is_file() and not entry.is_dir():
            link = entry.is_symlink()
            target = entry.readlink() if link else ""
            raise UserError(
                "A name in the data folder has no file behind it",
                where=entry.name,
                found=f"a link to {target}, which is not there"
                if link
                else "neither a file nor a folder",
                expected="a file with rows",
                fix="fetch what it points to (`dvc pull`?), or remove the link"
                if link
                else "move it elsewhere",
            )


def _stem(file: Path) -> str:
    """A file's name without the endings that say its format."""
    name = file.name
    if file.suffix.lower() in CODECS:
        name = Path(name).stem
    return Path(name).stem


def _split_words(file: Path) -> list[str]:
    """The words of a name that say a split: of the first and the last word, shard numbers off."""
    words = [word for word in re.split(r"[-_. ]+", _stem(file).lower()) if word]
    while len(words) > 1 and re.fullmatch(r"\d+|of|part", words[-1]):
        words.pop()
    ends = dict.fromkeys([re.sub(r"\d+$", "", word) for word in (*words[:1], *words[-1:])])
    return [word for word in ends if word in NAMES]


def _split_of(file: Path, words: list[str], label: str) -> str:
    splits = {NAMES[word] for word in words}
    if len(splits) > 1:
        raise UserError(
            "A file's name says two splits",
            where=_name(label, file.name),
            found=" and ".join(words),
            expected="one of train, valid and test",
            fix="rename it",
        )
    return splits.pop()


def _one_word_each(named: list[Path], words: dict[Path, list[str]], label: str) -> None:
    """Refuse valid.jsonl beside dev.jsonl: nobody says which of them is meant."""
    for split in dict.fromkeys(NAMES.values()):
        used = {word: file for file in named for word in words[file] if NAMES[word] == split}
        if len(used) > 1:
            raise UserError(
                f"Two names stand for the {split} split",
                where=label,
                found=", ".join(file.name for file in used.values()),
                expected=f"one name for {split}",
                fix="move one of them elsewhere, or rename it",
            )


def _same_name_twice(files: list[Path], label: str) -> None:
    """Refuse train.jsonl beside train.parquet: most likely the same rows twice."""
    stems: dict[str, Path] = {}
    for file in files:
        other = stems.setdefault(_stem(file), file)
        if other is not file:
            raise UserError(
                "The same name stands there in two formats",
                where=label,
                found=f"{other.name}, {file.name}",
                expected="one of them",
                fix="move one elsewhere",
            )


def _all_shards(files: list[Path], label: str) -> None:
    """Refuse `train-00000-of-00002` without its second: rows would be missing unnoticed."""
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for file in files:
        if shard := SHARD.fullmatch(_stem(file)):
            name, number, count = shard.groups()
            sets.setdefault((name, count), {})[int(number)] = number
    for (name, count), numbers in sets.items():
        most = int(count)
        first = 1 if most in numbers and 0 not in numbers else 0
        missing = [number for number in range(first, first + most) if number not in numbers]
        if missing:
            width = len(next(iter(numbers.values())))
            raise UserError(
                f"Shards are missing: {len(missing)} of {most}",
                where=_name(label, name),
                found="not there: "
                + listed([f"{name}-{number:0{width}}-of-{count}" for number in missing]),
                expected=f"all {most} files of {name}",
                fix="fetch the missing files, or rename the others without -of-" + count,
            )


def _with_train(sources: Sources, label: str) -> None:
    if "train" not in sources.splits:
        files = [source.name for split in sources.splits.values() for source in split]
        raise UserError(
            "There is no train file",
            where=label,
            found=", ".join(files[:MOST_NAMED]),
            expected="train.jsonl (or .json, .csv, .tsv, .parquet, also packed)",
            fix="rename one, or set data.path to a single file, which is then cut by data.shares",
        )


def _name(label: str, name: str) -> str:
    return f"{label}/{name}" if label else name


def _no_files(label: str, beside: list[str]) -> UserError:
    return UserError(
        "There is no file with rows",
        where=label,
        found=", ".join(beside[:MOST_NAMED]) or "nothing",
        expected=".jsonl, .ndjson, .json, .csv, .tsv or .parquet, also as .gz, .bz2, .zst or .lz4",
        fix="put train.jsonl there (valid.jsonl and test.jsonl if you have them)",
    )
