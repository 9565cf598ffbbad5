"""The train stage as real processes, by hand or under a stand-in for dvc, and ways to end it."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
from train_workspace import checkpoints, command, environment


def most_seconds():
    """An orphan ends within 2 s on a free machine; here others may want the cores.

    One that lived on would finish its run, whose results the tests look for as well.
    """
    return 10


class Run:
    """One start of the stage in a workspace.

    Its processes: `outer` (what was started: the supervisor, or the stand-in for dvc), `supervisor`
    and `child`.
    """

    def __init__(self, folder, *words, dvc=False, log="log.txt"):
        self.folder = folder
        self.log = open(folder / log, "w", encoding="utf-8")  # noqa: SIM115
        words = [str(stand_in(folder))] if dvc else command(*words)
        self.outer = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(),
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        self.started = time.monotonic()

    def said(self):
        """What the stage has printed, blanks and line ends squeezed."""
        return " ".join(Path(self.log.name).read_text().split())

    def tree(self):
        """All processes of this start that live now."""
        try:
            root = psutil.Process(self.outer.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find(self, child):
        """The supervisor, or the working child; None where it does not live."""
        for process in self.tree():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "stages.train" in words and any(x.startswith("--child") for x in words) == child:
                return process
        return None

    def wait_for_checkpoint(self, update):
        """Until a checkpoint of at least this update is there, or the stage has ended."""
        while self.outer.poll() is None and max(checkpoints(self.folder), default=0) < update:
            time.sleep(0.02)

    def end(self, way, number):
        """Send a signal: to the `group`, or only to `dvc`, the `parent` or the `child`."""
        target = {"parent": False, "child": True}.get(way)
        process = self.find(target) if target is not None else None
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if way == "group":
                os.killpg(self.outer.pid, number)
            elif way == "dvc":
                self.outer.send_signal(number)
            elif process is not None:
                process.send_signal(number)

    def wait_until_gone(self, processes):
        """Wait for these processes; returns the seconds it took."""
        start = time.monotonic()
        self.outer.wait(60)
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        return time.monotonic() - start

    def finish(self):
        """Wait for the stage's own end; returns its exit status."""
        status = self.outer.wait(120)
        self.log.close()
        return status


def stand_in(folder):
    """A program named dvc that runs the stage as dvc does: through a shell, forwarding nothing."""
    script = folder / "dvc"
    line = " ".join(command())
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, subprocess, sys\n"
        "os.environ['DVC_STAGE'] = 'train'\n"
        f"sys.exit(subprocess.run(['/bin/sh', '-c', {line + '; exit $?'!r}]).returncode)\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def once(folder, *words, log="log.txt"):
    """Run the stage to its end; returns the exit status and what it printed."""
    run = Run(folder, *words, log=log)
    status = run.finish()
    return status, run.said()


TERM, KILL, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT
