"""One point: `dvc exp run --temp` in a process group of its own, followed until it ends.

Points that run side by side take turns from their start until training begins. So the stages before
it run once and are restored by the others, and two of DVC's starts never mix.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from stages.commands.sweeping import ahead, experiments, state
from stages.commands.sweeping.points import Point, Sweep, point
from stages.core import files, paths
from stages.core.errors import UserError
from stages.core.machine.parent import SECONDS_BETWEEN_LOOKS

BUSY = "Unable to acquire lock"
MOST_TRIES = 40
GRACE_S = 60.0
"""Time for a point to end after it was interrupted: training writes a checkpoint."""
STAGE = re.compile(r"^(?:Running stage|Stage) '([^']+)'")
ERROR = re.compile(r"^(?:error|ERROR): (.+(?:\n  .+)*)", re.MULTILINE)
ALONE_UNTIL = "train"
AFTER_TRAINING = "evaluate"
"""From here on the next dvc may take memory."""
CHOICE_OF_SWEEP = "+sweep="

here = 0
"""Points that run in this very process."""
_watching = False


def run_point(composed: DictConfig, sweep: Sweep) -> float:
    """Run the point that Hydra has composed, or find it done; the job that Hydra launches.

    Returns:
        The tuned model's loss, in nats per target.

    Raises:
        RuntimeError: The point failed; its state says why. Hydra goes on with the others.
        KeyboardInterrupt: The sweep was stopped.
    """
    global here
    words = [
        word for word in HydraConfig.get().overrides.task if not word.startswith(CHOICE_OF_SWEEP)
    ]
    wanted = point(composed, words, sweep)
    here += 1
    _end_with(sweep)
    try:
        with state.alone(sweep.lock_file(wanted), lambda: is_over(sweep)):
            return Job(sweep, wanted).done()
    except InterruptedError:
        raise KeyboardInterrupt from None
    finally:
        here -= 1
        if is_over(sweep):
            ahead.end()


def is_over(sweep: Sweep) -> bool:
    """Whether somebody stopped the sweep, or the process that asked for it is gone."""
    return sweep.stop_file.exists() or is_gone(sweep)


def is_gone(sweep: Sweep) -> bool:
    """Whether the process that asked for the sweep has ended; unknown, so False, elsewhere."""
    if sweep.host != socket.gethostname():
        return False
    try:
        return psutil.Process(sweep.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _end_with(sweep: Sweep) -> None:
    """End a launcher's worker soon after the sweep: it may wait long for points that never come."""
    global _watching
    if _watching or os.getpid() == sweep.pid:
        return
    _watching = True

    def look() -> None:
        while here or not is_gone(sweep):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        ahead.end()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()


class Job:
    """A point while it runs."""

    def __init__(self, sweep: Sweep, wanted: Point) -> None:
        self.sweep, self.point = sweep, wanted
        known = state.read(sweep.folder, wanted.key)
        self.state = state.State(wanted.key, wanted.label, wanted.values)
        self.state.seconds = known.seconds if known else None
        self._reader: threading.Thread | None = None
        self._kept: tuple[str, ...] = ()

    def done(self) -> float:
        """Find it done or do it; as `run_point`."""
        try:
            return self._run()
        except UserError as error:
            raise self._failed("; ".join(error.lines()), self.state.experiment) from error

    def _run(self) -> float:
        name, found = experiments.find(self.point, self.sweep)
        self.state.experiment = name
        self.state.log = str(self.sweep.folder / "points" / f"{name}.log")
        if found is None:
            self.state.started = time.time()
            found = self._done_by_dvc()
            self.state.seconds = time.time() - self.state.started
        self.state.metrics = experiments.metrics(self.sweep.root, found)
        self._keep(state.DONE)
        return float(self.state.metrics["tuned"]["loss"])

    def _done_by_dvc(self) -> experiments.Found:
        for _ in range(MOST_TRIES):
            status = self._followed()
            name, found = experiments.find(self.point, self.sweep)
            if found is not None:
                return found
            if status == 0:
                raise self._failed("the code, rows or settings changed while it ran", name)
            if BUSY not in self._output():
                raise self._failed(self._reason(), name)
            time.sleep(random.uniform(0.5, 2.0))
        raise self._failed(f"DVC's lock stayed taken in {MOST_TRIES} tries", self.state.experiment)

    def _failed(self, reason: str, name: str) -> RuntimeError:
        self.state.experiment = name
        self.state.reason = reason
        self._keep(state.FAILED)
        return RuntimeError(f"{self.point.label}: {reason}")

    def _followed(self) -> int:
        """One try: start dvc in its turn, follow it, give its exit status."""
        self._keep(state.WAITING)
        with state.alone(self.sweep.turn_file, lambda: is_over(self.sweep)) as let_go:
            self._keep(state.RUNNING)
            child = self._start()
            try:
                while child.poll() is None:
                    if is_over(self.sweep):
                        raise KeyboardInterrupt
                    if self.state.stage == ALONE_UNTIL:
                        let_go()
                    if self.state.stage == AFTER_TRAINING:
                        ahead.prepare(self.sweep.root)
                    self._keep(state.RUNNING)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(SECONDS_BETWEEN_LOOKS)
            finally:
                if child.poll() is None:
                    self._interrupt(child)
                    self._keep(state.STOPPED)
                self._reader.join()
        return child.returncode

    def _start(self) -> subprocess.Popen:
        words = [word for override in self.point.overrides for word in ("-S", override)]
        words = ["exp", "run", "--temp", "-n", self.state.experiment, *words]
        child = ahead.start(self.sweep.root, words, self._environment())
        self._reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        self._reader.start()
        return child

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DVC_EXP_")}
        if self.sweep.threads is not None:
            kept.setdefault("OPENBLAS_NUM_THREADS", str(self.sweep.threads))
        programs = Path(sys.executable).parent
        return {**kept, "PATH": f"{programs}{os.pathsep}{kept.get('PATH', os.defpath)}"}

    def _read(self, child: subprocess.Popen) -> None:
        """Copy the output to the log, and note the stage and the last line."""
        with open(self.state.log, "w", encoding="utf-8") as log:
            for line in child.stdout:
                log.write(line)
                log.flush()
                match = STAGE.match(line)
                if match:
                    self.state.stage, self.state.note = match[1], ""
                elif line.strip() and not line.startswith((">", "Updating lock")):
                    self.state.note = line.strip()

    def _interrupt(self, child: subprocess.Popen) -> None:
        """End the child's group as Ctrl-C would, by force where that takes too long."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _output(self) -> str:
        return Path(self.state.log).read_text(encoding="utf-8")

    def _reason(self) -> str:
        """Why the stage failed: its own record, else the last error of its output."""
        with contextlib.suppress(UserError):
            record = files.read_json(paths.cache() / "last_error.json")
            if (
                record.get("experiment") == self.state.experiment
                and record["time"] >= self.state.started
            ):
                return _sentence(record)
        blocks = ERROR.findall(self._output())
        told = (
            "; ".join(line.strip() for line in blocks[0].splitlines()) if blocks else "dvc failed"
        )
        return f"{told} ({self.state.log})"

    def _keep(self, name: str) -> None:
        """Write the state where it changed."""
        self.state.state = name
        now = (name, self.state.stage, self.state.note, self.state.experiment)
        if now != self._kept:
            self._kept = now
            state.keep(self.sweep.folder, self.state)


def _sentence(record: dict[str, str]) -> str:
    """`train: what (found …; expected …; to do …)`."""
    parts = [("found", record.get("found")), ("expected", record.get("expected"))]
    parts.append(("to do", record.get("fix")))
    details = "; ".join(f"{name} {text}" for name, text in parts if text)
    where = f" at {record['where']}" if record.get("where") else ""
    what = f"{record.get('stage', 'a stage')}: {record.get('what', '')}{where}"
    return f"{what} ({details})" if details else what
