"""Start the processes of one run (`run.launch`), watch them, and end all of them when one is lost.

Processes of this machine are started here, those of other hosts by mlx.launch, through ssh. Neither
way trusts an exit status of 0 alone: `mlx.launch` gives it whatever happens, so the first rank also
leaves `completed` once every rank has reached the end. No MLX here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stages.core.config.schema import Launch
from stages.core.errors import RunFailed
from stages.core.machine import device, hosts, parent

LOST = 74
"""A rank's exit status when another one is gone (EX_IOERR of sysexits.h)."""
GRACE_S = 5.0
"""Time for the others to keep what is worth keeping once one has failed."""
ABANDONED_S = 1.0
"""The same once the process that asked for the work is gone."""
SECONDS_BETWEEN_LOOKS = 0.1
COMPLETED = "completed"
LEFT = (COMPLETED, "ring.json", "hosts.json", "rank*.log")
"""What a run of several processes leaves in its folder, of no use once it is through."""
LAST_LINES = 20


def run(launch: Launch, command: Sequence[str], folder: Path, watched: int) -> int:
    """Run one command as all ranks of a run; gives the exit status of the whole.

    Args:
        launch: Hosts and backend; two processes or more.
        command: Of every rank, as a command line.
        folder: For the logs of the ranks, and the marker that says that all reached the end.
        watched: Process id of the parent: everything ends with it.

    Raises:
        UserError: A host's address is not known, or the first host is not this machine.
        RunFailed: A rank was killed, or did not reach the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPLETED).unlink(missing_ok=True)
    if launch.here() == launch.workers():
        ranks = Ranks(launch, command, folder)
        parent.watch(ranks.abandon, under_dvc=False, pid=watched)
        status = ranks.wait()
    else:
        status = hosts.run(launch, command, folder, watched)
    if status == 0 and not (folder / COMPLETED).exists():
        raise RunFailed(
            "A process of this run ended before the others",
            where=", ".join(launch.names()),
            found="no word of the first one that all have reached the end",
            expected="every rank at the final barrier",
            fix="see what it printed; then run again: training goes on from its last checkpoint",
        )
    if status == 0:
        for name in LEFT:
            for file in folder.glob(name):
                file.unlink()
    return status


def completed(folder: Path) -> None:
    """Said by the first rank: every rank has reached the end, and the results are in place."""
    (folder / COMPLETED).touch()


@dataclass
class Rank:
    """One process.

    Attributes:
        process: Started.
        log: What it prints, None where that goes to the console.
        ended: Its exit status (minus a signal's number) where it ended without our doing.
    """

    process: subprocess.Popen
    log: Path | None
    ended: int | None = None


class Ranks:
    """The processes of a run on this machine."""

    def __init__(self, launch: Launch, command: Sequence[str], folder: Path) -> None:
        self._ranks: list[Rank] = []
        self._asked: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        given = environments(launch, folder)
        for rank, more in enumerate(given):
            log = folder / f"rank{rank}.log" if rank else None
            with contextlib.ExitStack() as opened:
                output = opened.enter_context(open(log, "wb")) if log else None
                process = subprocess.Popen(
                    command, env={**os.environ, **more}, stdout=output, stderr=output
                )
            self._ranks.append(Rank(process, log))
        if self._asked is not None:
            self._send(self._asked)

    def wait(self) -> int:
        """Until all have ended; the exit status of the whole.

        Raises:
            RunFailed: One was killed, or they lost each other.
        """
        failed_at = None
        while running := [rank for rank in self._ranks if rank.process.poll() is None]:
            for rank in self._ranks:
                if rank.ended is None:
                    rank.ended = rank.process.returncode
            if failed_at is None and any(rank.ended for rank in self._ranks):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        for rank in running:
            rank.process.kill()
            rank.process.wait()
        for rank in self._ranks:
            if rank.ended is None and rank not in running:
                rank.ended = rank.process.returncode
        return self._status()

    def abandon(self) -> None:
        """The process that asked for the work is gone: end all of this."""
        self._send(signal.SIGTERM)
        end = time.monotonic() + ABANDONED_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, end - time.monotonic()))
            rank.process.kill()
        os._exit(128 + signal.SIGTERM)

    def _status(self) -> int:
        ended = {place: rank.ended for place, rank in enumerate(self._ranks) if rank.ended}
        causes = {place: status for place, status in ended.items() if status != LOST}
        if self._asked is not None and causes:
            return 128 + self._asked
        for place, status in causes.items():
            if status < 0:
                raise self._lost(place, f"ended by {signal.Signals(-status).name}")
        for place, status in causes.items():
            if place:
                self._show(place)
            return status
        if ended or any(rank.ended is None for rank in self._ranks):
            raise self._lost(min(ended, default=0), "lost the connection to the others")
        return 0

    def _lost(self, place: int, how: str) -> RunFailed:
        for other in range(1, len(self._ranks)):
            self._show(other)
        return RunFailed(
            f"Rank {place} of {len(self._ranks)} (counted from 0) is lost, so the run has ended",
            found=how,
            expected="every rank to reach the end",
            fix="run again: training goes on from its last checkpoint",
        )

    def _show(self, place: int) -> None:
        """Print the end of a rank's log: nobody has seen it yet."""
        text = self._ranks[place].log.read_text(errors="replace").strip()
        for line in text.splitlines()[-LAST_LINES:]:
            print(f"rank {place}: {line}", file=sys.stderr, flush=True)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            rank.process.send_signal(number)


def environments(launch: Launch, folder: Path) -> list[dict[str, str]]:
    """What each rank on this machine finds in its environment beside ours.

    The names are MLX's: the ring reads MLX_RANK and MLX_HOSTFILE, NCCL the others. With nccl every
    rank sees one GPU, those of CUDA_VISIBLE_DEVICES in turn where that is set.
    """
    count = launch.workers()
    threads = {"OPENBLAS_NUM_THREADS": str(threads_each(count))}
    if launch.backend == "ring":
        file = folder / "ring.json"
        file.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
        return [
            {**threads, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(file.resolve())}
            for rank in range(count)
        ]
    (port,) = free_ports(1)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = seen.split(",")
    return [
        {
            **threads,
            "MLX_RANK": str(rank),
            "MLX_WORLD_SIZE": str(count),
            "NCCL_HOST_IP": "127.0.0.1",
            "NCCL_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": devices[rank % len(devices)],
        }
        for rank in range(count)
    ]


def threads_each(count: int) -> int:
    """OpenBLAS threads of each of `count` processes here: more than there are cores only slows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(device.threads(), max(1, (cores or 1) // count))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
