"""Look over this machine and project: what is missing, and how to mend it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from stages.commands import clean_cache
from stages.core import console, entry, files, paths
from stages.core.config import settings
from stages.core.errors import UserError
from stages.core.machine import device

OK, NOTE, WRONG = "ok", "note", "wrong"
LITTLE_SPACE_GB = 5.0


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        level: `ok`, `note` (works, but worth knowing) or `wrong`.
        name: What was looked at.
        text: What was found.
        fix: What to do, "" where nothing is to be done.
    """

    level: str
    name: str
    text: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Print the findings; 2 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m stages doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    given = parser.parse_args(argv)
    return entry.guarded("doctor", lambda: _report(given.json))


def _report(as_json: bool) -> int:
    found = []
    for finding in findings():  # a line as soon as it is known: `dvc status` takes its time
        found.append(finding)
        if as_json:
            continue
        console.say(f"{finding.level:<6} {finding.name:<12} {finding.text}")
        if finding.fix:
            console.say(f"{'':<6} {'':<12} to do: {finding.fix}")
    if as_json:
        print(json.dumps([finding.__dict__ for finding in found], indent=2))
    return entry.WRONG_INPUT if any(finding.level == WRONG for finding in found) else entry.DONE


def findings() -> Iterator[Finding]:
    """All findings, in the order of what breaks first. A check that fails is itself a finding."""
    checks = (python, packages, computes, memory, disk, cache, git, dvc, values)
    for check in checks:
        yield from _safely(check)


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except UserError as error:
        parts = [error.what, error.where, error.found]
        yield Finding(WRONG, check.__name__, ": ".join(filter(None, parts)), error.fix)
    except Exception as error:
        yield Finding(WRONG, check.__name__, f"could not be looked at: {error!r}")


def python() -> Iterator[Finding]:
    """The interpreter, and whether `dvc` and `python` on PATH are of its environment."""
    yield Finding(OK, "python", f"{sys.version.split()[0]} in {sys.prefix}")
    for name in ("python", "dvc"):
        path = shutil.which(name)
        if path is None or Path(path).parent != Path(sys.prefix) / "bin":
            text = f"{name} on PATH is {path or 'absent'}: DVC would run the stages with it"
            yield Finding(NOTE, "PATH", text, f"source {sys.prefix}/bin/activate")


def lock_file() -> Path:
    """The lock that the environment was made from."""
    mark = Path(sys.prefix) / ".backend"
    cuda = mark.exists() and mark.read_text().strip() == "cuda"
    return paths.here() / ("requirements-cuda.lock" if cuda else "requirements.lock")


def locked_versions(lock: Path) -> dict[str, str]:
    """Distribution → version that a lock file asks for on this machine."""
    wanted = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and line[0].isalnum():
            requirement = Requirement(line.rstrip(" \\"))
            if requirement.marker is None or requirement.marker.evaluate():
                wanted[requirement.name] = next(iter(requirement.specifier)).version
    return wanted


def packages() -> Iterator[Finding]:
    """Installed versions against the lock."""
    lock = lock_file()
    if not lock.is_file():
        yield Finding(WRONG, "packages", f"no {lock.name} here", "run from the project's root")
        return
    wanted = locked_versions(lock)
    wrong = []
    for name, version in wanted.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "absent"
        if installed != version:
            wrong.append(f"{name} {installed} instead of {version}")
    if wrong:
        yield Finding(
            WRONG, "packages", "; ".join(wrong), f"rm {sys.prefix}/.installed-*; make setup"
        )
    else:
        yield Finding(OK, "packages", f"all {len(wanted)} as in {lock.name}")


def computes() -> Iterator[Finding]:
    """The device with its measured BLAS rate."""
    found = device.prepare("auto", measure=True)
    slow = found.kind == "cpu" and found.blas.startswith("reference")
    fix = (
        "make setup (it installs an OpenBLAS), or install your system's libopenblas" if slow else ""
    )
    yield Finding(NOTE if slow else OK, "device", f"{found.line()}, {found.threads} threads", fix)


def memory() -> Iterator[Finding]:
    """Memory of the machine, now."""
    found = psutil.virtual_memory()
    text = f"{found.available / 1e9:.1f} GB available of {found.total / 1e9:.1f}"
    swap = psutil.swap_memory()
    yield Finding(OK, "memory", f"{text}; swap {swap.used / 1e9:.1f} of {swap.total / 1e9:.1f} GB")


def disk() -> Iterator[Finding]:
    """Free space where the project lies."""
    free = files.free_gb(paths.root())
    fix = "make clean-cache, or `dvc gc --workspace`" if free < LITTLE_SPACE_GB else ""
    yield Finding(NOTE if fix else OK, "disk", f"{free:.1f} GB free", fix)


def cache() -> Iterator[Finding]:
    """.cache and DVC's cache, by kind."""
    kinds = clean_cache.sizes()
    text = ", ".join(f"{kind} {size:.2f}" for kind, size in kinds.items()) or "empty"
    yield Finding(OK, ".cache", f"{text} (GB)")
    stored = paths.root() / ".dvc" / "cache"
    size = clean_cache.size_gb(stored) if stored.exists() else 0.0
    yield Finding(OK, ".dvc/cache", f"{size:.2f} GB")


def git() -> Iterator[Finding]:
    """The repository that DVC needs."""
    if shutil.which("git") is None:
        yield Finding(
            WRONG, "git", "not installed: DVC keeps a run's identity in it", "install git"
        )
        return
    if _run("git", "rev-parse", "--is-inside-work-tree") is None:
        fix = "clone the project, or: git init && git add . && git commit -m start"
        yield Finding(WRONG, "git", "no repository here", fix)
        return
    commit = _run("git", "log", "-1", "--format=%h %s")
    if not commit:
        fix = "git add . && git commit -m start"
        yield Finding(WRONG, "git", "no commit yet: `dvc exp run` needs one", fix)
        return
    changed = len((_run("git", "status", "--porcelain") or "").splitlines())
    yield Finding(OK, "git", f"at {commit}; {changed} files changed since")
    if not _run("git", "config", "user.email"):
        fix = "git config user.name …; git config user.email …"
        yield Finding(WRONG, "git", "no user.email: `dvc exp run` cannot commit", fix)


def dvc() -> Iterator[Finding]:
    """The pipeline's state and where it is shared."""
    if not (paths.here() / ".dvc").is_dir():
        yield Finding(WRONG, "dvc", "no .dvc folder here", "run from the project's root")
        return
    status = _ran(sys.executable, "-m", "dvc", "status", "--json")
    if status.returncode:
        said = [line for line in status.stderr.splitlines() if line.strip()]
        why = f": {said[0]}" if said else ""
        yield Finding(WRONG, "dvc", f"`dvc status` fails{why}", "run it to see more")
        return
    changed = list(json.loads(status.stdout))
    text = f"to run again: {', '.join(changed)}" if changed else "up to date"
    yield Finding(NOTE if changed else OK, "dvc", text, "dvc repro" if changed else "")
    remotes = (_run(sys.executable, "-m", "dvc", "remote", "list") or "").split()[::2]
    yield Finding(OK, "dvc remote", ", ".join(remotes) or "none: nothing is shared")


def values() -> Iterator[Finding]:
    """params.yaml and local.yaml: every value checked."""
    if not (paths.here() / settings.PARAMS).exists():
        yield Finding(NOTE, "settings", "no params.yaml yet", "make repro")
        return
    settings.load_settings()
    local = paths.local_settings()
    also = f" and {local.name}" if local.exists() else ""
    yield Finding(OK, "settings", f"params.yaml{also} fit")


def _run(*words: str) -> str | None:
    """What a command prints, None where it fails or does not exist."""
    try:
        done = _ran(*words)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def _ran(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1"}
    return subprocess.run(
        words, cwd=paths.here(), capture_output=True, text=True, check=False, env=environment
    )
