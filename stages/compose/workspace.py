"""params.yaml of a workspace: written from conf/, or only checked under `dvc exp run`."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.compose import applied, composition, experiment, record
from stages.core import console, files
from stages.core.config import settings
from stages.core.errors import UserError

PARAMS = settings.PARAMS
NOTHING = applied.Applied({}, {})
Values = dict[str, Any]


def check(folder: Path) -> None:
    """Under `dvc exp run` DVC composed params.yaml itself: check it and keep what conf/ said.

    Raises:
        UserError: A key is unknown, a type wrong or a value out of range.
    """
    written = settings.parse(folder / PARAMS)
    composition.check(written, PARAMS)
    plain = composition.leaves(composition.compose(folder / "conf"))
    values = composition.leaves(written)
    by = record.FROM_CONF if values == plain else record.EXPERIMENT
    record.keep(values, record.Record(conf=plain, by=by))
    console.say(f"{PARAMS} stands as `dvc exp run` composed it")


def write(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    keep: str | None = None,
    drop: bool = False,
    by_hand: bool = True,
) -> None:
    """Write params.yaml from conf/ and print each key that changed.

    Args:
        folder: The project's folder.
        overrides: As in `dvc exp run -S`.
        keep: Name under which the values of an applied experiment become part of conf/.
        drop: Forget the values of an applied experiment.
        by_hand: A person asked, not DVC: values that a person gave before give way.

    Raises:
        UserError: conf/ or an override is wrong, or values of an applied experiment would be lost
            and neither `keep` nor `drop` was said.
    """
    conf = folder / "conf"
    current = _current(folder)
    composed = composition.compose(conf)
    plain = composition.leaves(composed)
    known = record.find(current) if current else None
    given_way = drop or (by_hand and keep is None and known is not None and known.by == record.HAND)
    beside = NOTHING if given_way else _beside(folder, current, plain, known)
    if keep is not None:
        _keep(conf, keep, {**beside.carried, **beside.lost})
        composed = composition.compose(conf)
        plain, beside = composition.leaves(composed), NOTHING
    if overrides:
        composed = composition.compose(conf, overrides)
    asked = _asked(overrides, composition.leaves(composed), plain)
    lost = {key: value for key, value in beside.lost.items() if key not in asked}
    if lost:
        raise applied.undecided(lost, plain)
    carried = {key: value for key, value in beside.carried.items() if key not in asked}
    for key, value in carried.items():
        OmegaConf.update(composed, key, value, merge=False, force_add=True)
        console.say(f"{key}={value} stays, beside conf/")
    composition.check(composed, PARAMS)
    _finish(folder, current, composed)
    by = record.HAND if overrides else record.FROM_CONF
    if carried:
        by = known.by if known else record.EXPERIMENT
    record.keep(composition.leaves(composed), record.Record(conf=plain, by=by))


def _current(folder: Path) -> Values | None:
    """What params.yaml holds; None where there is none, or where no run could use it.

    A refused `dvc exp run -S train.learning_rate=-1` and a merge conflict leave such a file behind.
    """
    file = folder / PARAMS
    if not file.exists():
        return None
    try:
        written = settings.parse(file)
        composition.check(written, PARAMS)
    except UserError as error:
        console.warn(f"{PARAMS} is composed anew, no run could use it: {error.what}")
        return None
    return composition.leaves(written)


def _beside(
    folder: Path, current: Values | None, plain: Values, known: record.Record | None
) -> applied.Applied:
    """The values that params.yaml holds beside conf/, sorted."""
    if current is None or current == plain:
        return NOTHING
    before = known.conf if known else applied.head(folder)
    return NOTHING if before is None else applied.compare(current, before, plain)


def _asked(overrides: Sequence[str], composed: Values, plain: Values) -> set[str]:
    """The keys that overrides name or change."""
    named = {word.lstrip("+~").split("=", maxsplit=1)[0] for word in overrides}
    return {
        key
        for key in composed
        if composed[key] != plain.get(key)
        or any(key == name or key.startswith(name + ".") for name in named)
    }


def _keep(conf: Path, name: str, values: Values) -> None:
    if not values:
        raise UserError(
            "There is nothing to keep",
            where=PARAMS,
            found="the values of conf/",
            expected="values of an applied experiment (`dvc exp apply NAME`)",
        )
    experiment.keep(conf, name, values)
    console.say(f"conf/experiment/{name}.yaml holds {', '.join(values)} and is selected")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Write alone in this folder, what a killed compose left half-written removed before.

    Whoever writes holds the folder's lock, so what lies there under a temporary name is of none
    that lives.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed
            fcntl.flock(handle, fcntl.LOCK_EX)
            for left in folder.glob(f"{files.TEMPORARY_PREFIX}{PARAMS}-*"):
                left.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def _finish(folder: Path, current: Values | None, composed: Any) -> None:
    """Write params.yaml where its bytes differ, and print the keys that changed."""
    file, text = folder / PARAMS, composition.text(composed)
    with _writing(folder):
        if current is None or file.read_text(encoding="utf-8") != text:
            files.write_text(file, text)
    if current is None:
        console.say(f"{PARAMS} written")
        return
    new = composition.leaves(composed)
    for key in {**current, **new}:
        old_value, new_value = current.get(key, "absent"), new.get(key, "absent")
        if old_value != new_value:
            console.say(f"{key}: {old_value} → {new_value}")
