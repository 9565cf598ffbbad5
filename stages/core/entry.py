"""The one way a stage or command starts and ends: settings in, exit status out.

0 done; 2 the user's input or settings are wrong; 1 anything else; 130 and 143 after SIGINT and
SIGTERM. The last error is kept in `.cache/last_error.json`, since a temporary workspace is deleted
when its stage fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from stages.core import console, files, paths
from stages.core.config import schema
from stages.core.config.settings import Settings, known_keys, load_settings
from stages.core.errors import UserError

DONE, FAILED, WRONG_INPUT = 0, 1, 2
ORDER = (
    "compose",
    "collect",
    "model",
    "tokenize",
    "split",
    "validate",
    "train",
    "evaluate",
    "report",
)
OUTPUTS = {
    "collect": ("data/raw", "reports/collect.json"),
    "model": ("data/model.json",),
    "tokenize": ("data/tokens", "reports/tokenize.json"),
    "split": ("data/examples", "reports/split.json", "reports/lengths.png"),
    "validate": ("reports/validate.json",),
    "train": ("adapters", "reports/train"),
    "evaluate": (
        "reports/evaluate/rows.parquet",
        "reports/evaluate/samples.json",
        "reports/evaluate/metrics.json",
    ),
    "report": ("reports/report.html", "reports/card.md"),
}
"""What each stage writes; a killed one leaves it half-written under a temporary name."""
APART = (("collect", "model"),)
"""Stages of which the later one reads nothing of the earlier one."""


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived: unwind, keep what is worth keeping, end with 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stage(name: str, work: Callable[[Settings], None], argv: Sequence[str] | None = None) -> int:
    """Run one stage: merge the settings of this run, do the work, turn errors into a status.

    Args:
        name: The stage's name, for messages.
        work: Does the stage, given the merged settings.
        argv: `memory.*` and `run.*` overrides as `key=value`; default: the command line.
    """
    given = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(given):
        print(_help(name))
        return DONE

    def swept() -> int | None:
        if name != "train":  # that waits for its lock first, and sweeps when it writes
            sweep(name)
        return work(load_settings(overrides=given))

    return guarded(name, swept)


def sweep(name: str) -> None:
    """Remove what an earlier, killed start of a stage left beside its outputs."""
    for output in map(Path, OUTPUTS.get(name, ())):
        for left in output.parent.glob(f"{files.TEMPORARY_PREFIX}{output.name}-*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _help(name: str) -> str:
    """What a stage does, and what it takes: the first line of its docstring, the keys to set."""
    purpose = (sys.modules["__main__"].__doc__ or "").strip().split("\n\n", maxsplit=1)[0]
    keys = [key for key in known_keys() if key.split(".", maxsplit=1)[0] in schema.MACHINE]
    lines = [
        f"usage: python -m stages.{name} [memory.key=value run.key=value …]",
        "",
        purpose,
        "Every other setting comes from params.yaml, which `python -m stages.compose` writes.",
        "",
        *(f"  {key}" for key in keys if not any(other.startswith(key + ".") for other in keys)),
    ]
    return "\n".join(lines)


def guarded(name: str, work: Callable[[], int | None]) -> int:
    """Call `work`, print and record what goes wrong, and give the exit status.

    A stage that was begun and not done leaves a mark, by which a later one run by hand says that
    it may read what an earlier run left. DVC removes a stage's outputs first, and needs no word.
    """
    if name not in ORDER:
        return _guarded(name, work)
    mark = _mark(name)
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if "DVC_STAGE" not in os.environ:
        for earlier in ORDER[: ORDER.index(name)]:
            if _mark(earlier).exists() and (earlier, name) not in APART:
                console.warn(f"{earlier} was begun and not done: its files are of an earlier run")
    status = _guarded(name, work)
    if status == DONE:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)
    return status


def _mark(name: str) -> Path:
    return paths.here() / paths.CACHE / "begun" / name


def _guarded(name: str, work: Callable[[], int | None]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        return work() or DONE
    except UserError as error:
        _record(name, error.status, error.record())
        console.fail(error.lines())
        return error.status
    except Stopped as stopped:
        _record(name, 128 + stopped.number, {"what": signal.Signals(stopped.number).name})
        console.say(f"{name}: stopped by {signal.Signals(stopped.number).name}")
        return 128 + stopped.number
    except Exception as error:
        return _unexpected(name, error)


def _unexpected(name: str, error: Exception) -> int:
    plain = files.refused(error)
    if files.is_disk_full(error):
        plain = files.disk_full(paths.here(), error)
    if plain is not None:
        _record(name, WRONG_INPUT, plain.record())
        console.fail(plain.lines())
        return WRONG_INPUT
    _record(name, FAILED, {"what": repr(error), "traceback": traceback.format_exc()})
    traceback.print_exc()
    console.fail([f"{name} failed: {error!r}"])
    return FAILED


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def _record(name: str, status: int, message: dict[str, str]) -> None:
    """Keep the message; a disk that refuses even this must not hide the message itself."""
    point = os.environ.get("DVC_EXP_NAME", "")
    entry = {"stage": name, "status": status, "experiment": point, "time": time.time(), **message}
    try:
        files.write_json(paths.cache() / "last_error.json", entry)
    except (OSError, UserError):
        console.warn("could not write .cache/last_error.json")
