"""What a kill costs: `python -m benchmarks.resume`.

The train stage on a few examples with a checkpoint after every update, once undisturbed, then
killed (SIGKILL, every process of it) as soon as a checkpoint in its midst is on the disk, and
started again. Seconds run from the kill until the next checkpoint: start, load of the model, the
checkpoint read, the activation cache opened, one update. Both runs end with adapters whose bytes
are compared. Then, in one more process, how long a checkpoint takes to write.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, points, workspace
from benchmarks.spec import OURS, Spec
from stages.core import console, entry, files
from stages.core.errors import RunFailed
from stages.core.machine import device

EXAMPLES, MANY, KILLED_AFTER = 16, 40, 3
LOOK_S, LIMIT_S = 0.005, 600.0
WORDS = ("run.updates_per_save=1", "run.keep_last=2")
WRITES = 5


def main(argv: Sequence[str]) -> int:
    """Take the figures and write `<out>/resume.json`, or be the process that writes checkpoints."""
    if given := workspace.asked_of(list(argv)):
        asked, result = given
        return entry.guarded("benchmarks", lambda: files.write_json(result, measured(asked)))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="kills, each a run of its own")
    parser.add_argument("--quick", action="store_true", help="the tiny model: does it run?")
    parser.add_argument("--out", type=Path)
    return entry.guarded("benchmarks", lambda: _take(parser.parse_args(argv)))


def _take(given: argparse.Namespace) -> int:
    job = points.Job("tiny", 96, 2) if given.quick else points.Job("smollm2", 384, 8)
    count = MANY if given.quick else EXAMPLES  # of tiny ones a run would be over too soon
    folder = job.prepared(count)
    facts = machine.facts()
    undisturbed = Run(folder).to_the_end()
    wanted = files.sha256_file(folder / "adapters" / "adapters.safetensors")
    console.say(f"undisturbed: {_told(undisturbed)}")
    killed, same = [], True
    for _ in range(given.repeats):
        killed.append(killed_once(folder))
        same &= files.sha256_file(folder / "adapters" / "adapters.safetensors") == wanted
        console.say(f"killed: {killed[-1]['to_first_update_s']:.2f} s to the next update")
    checkpoints = {}
    for name, changes in {"LoRA": {}, "two whole layers": {"fine_tune_type": "full"}}.items():
        asked = {"layers": job.layers if name == "LoRA" else 2, **changes}
        checkpoints[name] = workspace.measured(folder, "benchmarks.resume", asked)
        console.say(f"a checkpoint of {name}: {checkpoints[name]['seconds'] * 1e3:.0f} ms")
    update = statistics.median(undisturbed["updates_s"][1:])
    first = statistics.median(x["to_first_update_s"] for x in killed)
    report = {
        "kind": "resume",
        "machine": facts,
        "undisturbed": undisturbed,
        "killed": killed,
        "medians": {
            "update_s": update,
            "to_first_update_s": first,
            "cost_s": first - update,
            "start_s": undisturbed["updates_s"][0],
        },
        "same_bits": same,
        "checkpoints": checkpoints,
        "words": f"{count} examples, 8 an update, a checkpoint after each; killed after update"
        f" {KILLED_AFTER}, {given.repeats} times.",
    }
    out = given.out or (workspace.WORK / "quick" if given.quick else machine.RESULTS)
    files.write_json(out / "resume.json", report)
    console.say(f"a kill costs {first - update:.2f} s; the same bits: {same}")
    return entry.DONE if same else entry.FAILED


def _told(run: dict[str, Any]) -> str:
    return ", ".join(f"{x:.2f}" for x in run["updates_s"]) + " s to each checkpoint"


class Run:
    """One start of the train stage in a workspace, in a session of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / ".cache" / "checkpoints"
        self.before = self.saved()
        self.log = open(folder / "train.log", "w", encoding="utf-8")  # noqa: SIM115 (outlives this)
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stages.train", *WORDS],
            cwd=folder,
            env={**workspace.environment(), "DVC_ROOT": str(folder)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def saved(self) -> set[int]:
        """Updates whose whole checkpoint is on the disk."""
        return {int(path.parent.name) for path in self.checkpoints.glob("*/[0-9]*/state.json")}

    def wait_for(self, update: int | None) -> list[tuple[int, float]]:
        """Until a new checkpoint of this update is there, or (None) the run has ended.

        Returns:
            (update, seconds since the start) of every new checkpoint.

        Raises:
            RunFailed: The run failed, or nothing came in time.
        """
        seen: dict[int, float] = {}
        while update not in seen:
            ended = self.process.poll()
            now = time.perf_counter() - self.started
            for number in self.saved() - self.before - seen.keys():
                seen[number] = now
            if ended is not None or now > LIMIT_S:
                break
            time.sleep(LOOK_S)
        if (update is None and self.process.poll() == 0) or update in seen:
            return sorted(seen.items())
        self.kill()
        said = (self.folder / "train.log").read_text(errors="replace")[-2000:]
        raise RunFailed("The train stage failed in a benchmark", found=said)

    def kill(self) -> None:
        """End every process of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def to_the_end(self) -> dict[str, Any]:
        """Seconds to each checkpoint, from the one before."""
        times = [seconds for _, seconds in self.wait_for(None)]
        self.log.close()
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        return {"updates_s": gaps, "seconds": time.perf_counter() - self.started}


def killed_once(folder: Path) -> dict[str, Any]:
    """A run that is killed and started again: seconds from the kill to the first new update."""
    shutil.rmtree(folder / "adapters", ignore_errors=True)
    first = Run(folder)
    first.wait_for(KILLED_AFTER)
    killed = time.perf_counter()
    first.kill()
    second = Run(folder)
    last = max(second.before)
    seen = second.wait_for(last + 1)
    to_first = second.started + seen[-1][1] - killed
    rest = second.to_the_end()
    return {"to_first_update_s": to_first, "killed_after": last, "rest_s": rest["seconds"]}


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """Median seconds and size of a checkpoint of a run that has taken one update."""
    chosen = device.prepare("auto")
    import mlx.core as mx

    from benchmarks import ours, subject
    from stages.train.checkpoint import Store

    kind = asked.get("fine_tune_type", "lora")
    spec = Spec(OURS, points.TRAIN, 384, layers=asked["layers"], passes=1, fine_tune_type=kind)
    settings = subject.settings_of(spec)
    loaded = subject.load(spec, chosen, settings, lazy=False)
    plan = subject.equal_rows(spec, loaded.manifest, loaded.examples, chosen.kind)
    job, state = ours.prepare(loaded, plan, spec)
    mx.eval(loaded.model.parameters())
    folder = Path("checkpoints-timed").resolve()
    store, seconds = Store(folder, "timed"), []
    state.update = 1
    for _ in range(WRITES):
        started = time.perf_counter()
        path = store.save(state, job.step, keep_last=1)
        seconds.append(time.perf_counter() - started)
    size = sum(file.stat().st_size for file in path.iterdir())
    shutil.rmtree(folder)
    return {"seconds": statistics.median(seconds), "values": seconds, "mb": size / 1e6}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
