"""Ranks on several hosts: mlx.launch in this process, with what it lacks.

It is told addresses in place of names, this machine's own processes without ssh, and never reads a
console that is not there. A signal goes to this machine's ranks alone: they tell the others.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import psutil

from stages.core.config.schema import THIS_HOST, Launch
from stages.core.errors import UserError
from stages.core.machine import device, parent

ABANDONED_S = 1.0
LOOPBACK = "127.0.0.1"
"""mlx.launch starts a process of this ssh name without ssh."""
CHILD = "--child="
"""In the command line of every rank."""


def run(launch: Launch, command: Sequence[str], folder: Path, watched: int) -> int:
    """Run the command on all hosts. mlx.launch says nothing of how that ended: always 0.

    Args:
        watched: Process id of the parent: everything ends with it.

    Raises:
        UserError: A host's address is not known, or the first host is not this machine.
    """
    file = folder / "hosts.json"
    file.write_text(json.dumps(hostfile(launch.names())))
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        signal_ranks(number)

    def abandoned() -> None:
        signal_ranks(signal.SIGTERM)
        time.sleep(ABANDONED_S)
        os._exit(128 + signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    parent.watch(abandoned, under_dvc=False, pid=watched)
    main = importlib.metadata.entry_points(group="console_scripts", name="mlx.launch")
    with _open_stdin(), _arguments(arguments(launch, file, command)):
        next(iter(main)).load()()
    return 128 + asked[0] if asked else 0


def hostfile(names: Sequence[str]) -> list[dict[str, object]]:
    """The hosts as mlx.launch reads them: an ssh name and an address for each rank.

    Raises:
        UserError: See `run`.
    """
    addresses = [address(name) for name in names]
    if not is_here(addresses[0]):
        raise UserError(
            "The first host of a run must be this machine: it writes the results",
            where="run.launch.hosts",
            found=names[0],
            expected="an address or name of this machine that the others reach",
            fix="put this machine first, by its address in your network",
        )
    if any(name in THIS_HOST for name in names):
        raise UserError(
            "Other hosts cannot reach this machine by that name",
            where="run.launch.hosts",
            found=", ".join(names),
            expected="its address in your network",
            fix=f"write that in place of {' and '.join(THIS_HOST)}",
        )
    return [
        {"ssh": LOOPBACK if is_here(ip) else name, "ips": [ip]}
        for name, ip in zip(names, addresses, strict=True)
    ]


def address(name: str) -> str:
    """The IPv4 address of a host.

    Raises:
        UserError: Nobody knows it.
    """
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise UserError(
            "A host's address is not known",
            where="run.launch.hosts",
            found=f"{name} ({error})",
            expected="a name that resolves, or an address",
        ) from error


def is_here(ip: str) -> bool:
    """Whether an address is one of this machine's interfaces."""
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return ip in own


def arguments(launch: Launch, file: Path, command: Sequence[str]) -> list[str]:
    """mlx.launch's command line: the same folder and interpreter on every host."""
    names = launch.names()
    most = max(names.count(name) for name in names)
    kept = {name: os.environ[name] for name in ("DVC_ROOT",) if name in os.environ}
    if most > 1:
        kept["OPENBLAS_NUM_THREADS"] = str(max(1, device.threads() // most))
    words = [f"--env={name}={value}" for name, value in kept.items()]
    if launch.backend == "nccl":
        words.append(f"--repeat-hosts={most}")
    where = ["--hostfile", str(file), "--backend", launch.backend, "--cwd", str(Path.cwd())]
    return ["mlx.launch", *where, *words, "--", *command]


def signal_ranks(number: int) -> None:
    """Send a signal to the ranks on this machine."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.startswith(CHILD) for word in process.cmdline()):
                process.send_signal(number)


@contextlib.contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    was, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = was


@contextlib.contextmanager
def _open_stdin() -> Iterator[None]:
    """A stdin that never has anything: mlx.launch would read the end of a closed one for ever."""
    reading, writing = os.pipe()
    was = os.dup(0)
    os.dup2(reading, 0)
    try:
        yield
    finally:
        os.dup2(was, 0)
        for handle in (reading, writing, was):
            os.close(handle)
