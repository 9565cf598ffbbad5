"""git as this project asks it: words in, text out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from stages.core.errors import RunFailed, UserError


def run(*words: str, cwd: Path, given: str | None = None) -> str:
    """What a git command prints.

    Args:
        words: The command without `git`.
        cwd: Where it runs.
        given: Its standard input.

    Raises:
        RunFailed: git ends with another status than 0; its own words are in the message.
    """
    done = subprocess.run(
        ["git", *words], cwd=cwd, input=given, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RunFailed(
            f"`git {' '.join(words[:2])}` failed",
            where=str(cwd),
            found=" ".join(done.stderr.split()) or f"status {done.returncode}",
        )
    return done.stdout


def asked(*words: str, cwd: Path) -> str | None:
    """What a git command prints, without the final newline; None where it fails."""
    try:
        return run(*words, cwd=cwd).strip()
    except RunFailed:
        return None


def listed(*words: str, cwd: Path, given: str | None = None) -> list[str]:
    """The entries that a git command with `-z` prints."""
    return [entry for entry in run(*words, cwd=cwd, given=given).split("\0") if entry]


def require_commit(folder: Path) -> None:
    """Refuse a folder in which DVC could keep no experiment.

    Raises:
        UserError: There is no repository, no commit, or nobody to commit as.
    """
    if asked("rev-parse", "--is-inside-work-tree", cwd=folder) is None:
        raise UserError(
            "There is no git repository here",
            where=str(folder),
            expected="a clone, since DVC keeps an experiment as a commit",
            fix="clone the project, or: git init && git add . && git commit -m start",
        )
    if asked("rev-parse", "--verify", "HEAD", cwd=folder) is None:
        raise UserError(
            "There is no commit yet",
            where=str(folder),
            expected="one commit, which experiments start from",
            fix="git add . && git commit -m start",
        )
    if not os.environ.get("GIT_COMMITTER_EMAIL") and not asked("config", "user.email", cwd=folder):
        raise UserError(
            "git does not know who you are",
            found="no user.email",
            fix="git config user.name NAME && git config user.email ADDRESS",
        )


def hashes(folder: Path, paths: Sequence[str]) -> dict[str, str]:
    """Blob hash of every tracked file below `paths`, as it stands in the working tree."""
    files = {}
    for entry in listed("ls-files", "-s", "-z", "--", *paths, cwd=folder):
        facts, path = entry.split("\t", maxsplit=1)
        files[path] = facts.split()[1]
    changed = set(listed("diff", "--name-only", "-z", "--", *paths, cwd=folder))
    there = sorted(path for path in changed if (folder / path).is_file())
    for path in changed - set(there):
        files.pop(path, None)
    if there:
        given = "".join(f"{path}\n" for path in there)
        found = run("hash-object", "--stdin-paths", cwd=folder, given=given).split()
        files |= dict(zip(there, found, strict=True))
    return files


def hashes_at(folder: Path, revision: str, paths: Sequence[str]) -> dict[str, str]:
    """Blob hash of every file below `paths` in a commit."""
    files = {}
    for entry in listed("ls-tree", "-r", "-z", revision, "--", *paths, cwd=folder):
        facts, path = entry.split("\t", maxsplit=1)
        files[path] = facts.split()[2]
    return files
