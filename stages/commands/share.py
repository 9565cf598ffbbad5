"""Give what was run to the team: rows, outputs and run cache to the store, commits to git."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stages.commands.sharing import dvc, git, store, tracked
from stages.commands.sweeping import experiments
from stages.core import console, entry, paths
from stages.core.errors import RunFailed, UserError, listed

LEFT_TO_GIT = ("dvc.lock", "params.yaml", "reports/evaluate/metrics.json")


def main(argv: Sequence[str]) -> int:
    """Check, push, say what a colleague does."""
    parser = argparse.ArgumentParser(prog="python -m stages share", description=__doc__)
    parser.add_argument("--store", metavar="PLACE", help="name the store: a folder or s3://…")
    parser.add_argument("--to", metavar="REMOTE", default="origin", help="git's remote (origin)")
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="to push as well")
    given = parser.parse_args(argv)
    return entry.guarded(
        "share", lambda: share(paths.here(), given.to, given.store, given.experiments)
    )


def share(root: Path, remote: str, place: str | None, names: Sequence[str]) -> None:
    """Push everything that a clone needs to run nothing again.

    Args:
        root: The project's folder.
        remote: git's remote.
        place: Names (or moves) the store first.
        names: Of experiments to push.

    Raises:
        UserError: Something would be missing in a clone, a secret would be shared, or there is no
            store or git remote.
        RunFailed: A push failed.
    """
    require_shareable(root, remote)
    if place:
        store.name_for_all(root, place)
    found = store.require(root)
    require_experiments(root, found, names)
    dvc.run("push", "--run-cache", "--remote", found.name, cwd=root)
    console.say(f"{found.url}: outputs and run cache are there")
    _push_commits(root, remote)
    if names:
        dvc.run("exp", "push", "--run-cache", "--remote", found.name, remote, *names, cwd=root)
        console.say(f"{remote}: {', '.join(names)}; a colleague pulls with `dvc exp pull`")
    console.say("a colleague: git clone, then `make join`")


def require_shareable(root: Path, remote: str) -> None:
    """Refuse what would leave a clone without something, or the team with a secret.

    Raises:
        UserError: What is wrong and the line that mends it.
    """
    git.require_commit(root)
    store.require_no_secrets(root)
    tracked.require_rows(root)
    tracked.require_project(root)
    changed = git.listed("status", "--porcelain", "-z", "--untracked-files=no", cwd=root)
    changed = [entry[3:] for entry in changed if len(entry) > 3 and entry[2] == " "]
    new = git.listed("ls-files", "--others", "-z", "--", *LEFT_TO_GIT, cwd=root)
    if changed or new:
        raise UserError(
            "Changes are not committed, so a clone would lack them",
            found=listed([*changed, *new]),
            fix=f"git add {' '.join(['-u', *new])} && git commit",
        )
    if git.asked("remote", "get-url", remote, cwd=root) is None:
        raise UserError(
            "git has no such remote",
            found=remote,
            expected=", ".join((git.asked("remote", cwd=root) or "none").split()),
            fix=f"git remote add {remote} ADDRESS",
        )


def require_experiments(root: Path, found: store.Store, names: Sequence[str]) -> None:
    """Refuse experiments that DVC could not push: it reads the store from their own commits.

    Raises:
        UserError: There is no such experiment, or it is older than the store.
    """
    known = experiments.names(root)
    for name in names:
        if name not in known:
            raise UserError(
                "There is no such experiment", found=name, expected=listed(sorted(known))
            )
        settings = git.asked("show", f"{known[name][-1]}:{store.CONFIG}", cwd=root) or ""
        if store.default(settings) != found.name:
            raise UserError(
                "An experiment is older than the store, so DVC cannot push it",
                found=name,
                expected=f"{store.CONFIG} with the store {found.name} in its commit",
                fix=f"dvc exp remove {name}, then make it again: training comes out of DVC's cache",
            )


def _push_commits(root: Path, remote: str) -> None:
    """`git push`, with what to do when a colleague was faster."""
    branch = git.asked("symbolic-ref", "--short", "HEAD", cwd=root)
    if branch is None:
        raise UserError(
            "No branch is checked out", fix="git switch -c NAME, then share again", found="HEAD"
        )
    try:
        git.run("push", "--set-upstream", remote, branch, cwd=root)
    except RunFailed as error:
        if "rejected" not in error.found and "fetch first" not in error.found:
            raise
        raise UserError(
            "A colleague has pushed before you",
            where=f"{remote}, branch {branch}",
            expected="their commits in yours",
            fix=f"git pull --no-rebase {remote} {branch}; where dvc.lock conflicts take either"
            " (docs/teams.md), then share again",
        ) from error
    console.say(f"{remote}: branch {branch} is there")
