"""The one way files are written: under a temporary name beside the target, synced, then renamed.

A crash leaves either the old file or the new one, never half of one. Temporary names start with
`.tmp-` and are swept by `remove_leftovers`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.core.errors import UserError

TEMPORARY_PREFIX = ".tmp-"
REFUSALS = {
    errno.EACCES: "a place that you may read and write",
    errno.EPERM: "a place that you may read and write",
    errno.EROFS: "a disk that can be written to",
    errno.ENAMETOOLONG: "a shorter name",
    errno.ELOOP: "a link that leads to a file",
    errno.ENOTDIR: "a folder",
    errno.EISDIR: "a file",
    errno.EFBIG: "room for it under the limit on file sizes (`ulimit -f`)",
    errno.EMFILE: "more open files (`ulimit -n`)",
}
"""What the system says when a person, not the program, has to change something."""


def disk_full(path: Path, error: OSError) -> UserError:
    """The message for a write that failed because no space (or quota) is left at `path`."""
    return UserError(
        "No space left on the disk",
        where=str(path),
        found=f"{os.strerror(error.errno or errno.ENOSPC)}, {free_gb(path):.2f} GB free",
        fix="free some space (`make clean-cache` removes what can be rebuilt), then run again",
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception says that the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def refused(error: BaseException) -> UserError | None:
    """The message where the system refused a file (rights, a name, a limit); None otherwise."""
    if not isinstance(error, OSError) or error.errno not in REFUSALS:
        return None
    if error.filename is None and error.errno not in (errno.EFBIG, errno.EMFILE):
        return None
    return UserError(
        "The system refused a file or folder",
        where=str(error.filename or Path.cwd()),
        found=os.strerror(error.errno),
        expected=REFUSALS[error.errno],
        fix="change that, then run again",
    )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success sync it and rename it to `path`.

    On any error the temporary file is removed and `path` stays as it was.

    Raises:
        UserError: No space is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}"
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path.parent, error) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Like `replacing`, for a whole folder: it appears complete, or the old one stays.

    An existing folder at `path` is moved aside first and removed once the new one is in place.

    Raises:
        UserError: No space is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{mark}"
    old = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{mark}-old"
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            sync(file)
        if path.exists():
            os.rename(path, old)
        os.rename(temporary, path)
        sync(path.parent)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path.parent, error) from error
        raise
    finally:
        if old.exists() and not path.exists():
            os.rename(old, path)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Ask the operating system to put a file or folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys and a final newline, whole or not at all.

    Raises:
        ValueError: A number is not finite (JSON has no word for it).
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file that this project wrote.

    Raises:
        UserError: It is missing or torn.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            "A file of an earlier stage is missing", where=str(path), fix="run `dvc repro`"
        ) from error
    except ValueError as error:
        raise UserError(
            "A file is not valid JSON",
            where=str(path),
            found=error,
            fix="remove it and run `dvc repro`",
        ) from error


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_gb(path: Path) -> float:
    """Free space in GB (1e9 bytes) on the disk that holds `path` or its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 1e9


def remove_leftovers(folder: Path) -> int:
    """Remove what an ended process left under temporary names; returns how many entries."""
    leftovers = list(Path(folder).glob(f"{TEMPORARY_PREFIX}*"))
    for entry in leftovers:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
    return len(leftovers)
