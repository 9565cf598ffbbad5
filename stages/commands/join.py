"""Take what the team shared into a clone: outputs and run cache, so that nothing runs again."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from stages.commands.sharing import dvc, git, store
from stages.core import console, entry, paths
from stages.core.errors import RunFailed, UserError, listed

ABSENT = re.compile(r"failed to transfer .*(No such file|Not Found|NoSuchKey|404)")
LOST = re.compile(r"failed for following targets:\n(.*?)\nIs your cache", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Pull, say what would still run, name shared experiments."""
    parser = argparse.ArgumentParser(prog="python -m stages join", description=__doc__)
    parser.add_argument(
        "--store", metavar="PLACE", help="where the store lies for this machine, if elsewhere"
    )
    parser.add_argument("--from", dest="remote", metavar="REMOTE", default="origin")
    given = parser.parse_args(argv)
    return entry.guarded("join", lambda: join(paths.here(), given.remote, given.store))


def join(root: Path, remote: str, place: str | None) -> None:
    """Pull what dvc.lock names and the run cache.

    Args:
        root: The clone.
        remote: git's remote, asked for experiments.
        place: The store's address on this machine, kept in .dvc/config.local.

    Raises:
        UserError: There is no store, it is not reached, or it lacks a file.
    """
    git.require_commit(root)
    if place:
        store.name_here(root, place)
    found = store.require(root)
    words = ("pull", "--run-cache", "--force", "--remote", found.name)
    status, output = dvc.tried(*words, cwd=root)
    if status != 0:
        if ABSENT.search(output):
            output += dvc.tried("checkout", "--force", cwd=root)[1]
        raise _not_pulled(found, output)
    console.say(f"{found.url}: outputs and run cache are here")
    changed = json.loads(dvc.run("status", "--json", cwd=root).splitlines()[-1] or "{}")
    if changed:
        console.warn(f"`dvc repro` would run {', '.join(changed)}: they were not shared as run")
    else:
        console.say("`dvc repro --pull` runs nothing")
    _name_experiments(root, remote)


def _not_pulled(found: store.Store, output: str) -> UserError:
    """The message for a store that lacks files, or that can't be read at all."""
    lost = LOST.search(output)
    if lost is None:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        return RunFailed("The store cannot be read", where=found.url, found=" ".join(words[-3:]))
    return UserError(
        "The store lacks files that dvc.lock names",
        where=found.url,
        found=listed(lost[1].split()),
        expected="all rows and outputs of the last run",
        fix="on the machine that ran it: make share; or here, run it again: dvc repro",
    )


def _name_experiments(root: Path, remote: str) -> None:
    status, output = dvc.tried("exp", "list", "--name-only", "--all-commits", remote, cwd=root)
    names = sorted(set(output.split())) if status == 0 else []
    if names:
        console.say(f"shared experiments: {listed(names)}; `dvc exp pull {remote} NAME` takes one")
