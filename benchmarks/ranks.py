"""One run in several processes of this machine: `python -m benchmarks.ranks [SHAPE] [--ranks N]`.

Every rank loads the same random model. The first one takes passes alone while the others wait, then
all take the same passes together. Two of each, turn by turn, after one of each for compiling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import choice, machine, shapes
from benchmarks.gpu import CAP, LENGTHS, ROWS
from benchmarks.spec import OURS, Spec
from stages.core import console, entry, files
from stages.core.config import schema
from stages.core.machine import launch

RANK = "--one-rank="
"""In the command line of a rank: the specification of what is measured, as JSON."""


def main(argv: Sequence[str]) -> int:
    """Take the figure, or be a rank of it."""
    if argv and argv[0].startswith(RANK):
        return entry.guarded("benchmarks", lambda: _rank(json.loads(argv[0].removeprefix(RANK))))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("shape", nargs="?", default="qwen3-4b", choices=list(shapes.SHAPES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="nccl", help="nccl or ring")
    parser.add_argument("--rows", type=int, default=ROWS, help="examples in a pass")
    parser.add_argument("--cap", type=int, default=CAP, help="longest example, in tokens")
    parser.add_argument("--batch", type=int, default=8, help="most rows of a micro-batch")
    parser.add_argument("--effective", type=int, default=64, help="examples per update")
    parser.add_argument("--layers", type=int, default=8, help="trained layers")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=machine.REPOSITORY / "benchmarks" / "results")
    given = parser.parse_args(argv)
    return entry.guarded("benchmarks", lambda: _take(given))


def _take(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [
            (first, min(length, given.cap)) for first, length in json.loads(LENGTHS.read_text())
        ]
        drawn = choice.random(
            [x for x in pairs if x[0] < x[1]], shapes.SHAPES[given.shape]["vocab_size"]
        )
        choice.write(folder / "examples.parquet", choice.spread(drawn, given.rows))
        asked = {**vars(given), "out": str(folder / "found.json"), "folder": str(folder)}
        command = [sys.executable, "-m", "benchmarks.ranks", RANK + json.dumps(asked)]
        launched = schema.Launch(hosts=given.ranks, backend=given.backend)
        facts = machine.facts()
        ranks = launch.Ranks(launched, command, folder)
        if status := ranks.wait():
            raise SystemExit(status)
        found = files.read_json(folder / "found.json")
    alone, together = (statistics.median(found[name]) for name in ("alone_s", "together_s"))
    report = {"machine": facts, "asked": {k: str(x) for k, x in vars(given).items()}, **found}
    report["times_faster"] = alone / together
    files.write_json(given.out / f"ranks-{given.shape}-{given.backend}.json", report)
    console.say(f"a pass alone {alone:.3f} s, {given.ranks} ranks {together:.3f} s:"
                f" {alone / together:.2f} times as fast")  # fmt: skip


def _rank(asked: dict) -> None:
    from stages.core.machine import device

    chosen = device.prepare(asked["device"])
    from benchmarks import ours, subject
    from stages.train.ranks import several

    ranks = several.join(schema.Launch(asked["ranks"], asked["backend"]))
    spec = Spec(
        OURS,
        str(Path(asked["folder"]) / "examples.parquet"),
        asked["cap"],
        layers=asked["layers"],
        rows=asked["batch"],
        effective=asked["effective"],
        passes=1,
        shape=asked["shape"],
        dtype=asked["dtype"],
        kind=asked["device"],
    )
    settings = subject.settings_of(spec)
    loaded = subject.load(spec, chosen, settings, lazy=False)
    plan = ranks.agreed(
        lambda: subject.equal_rows(spec, loaded.manifest, loaded.examples, chosen.kind)
    )
    shared, state = ours.prepare(loaded, plan, spec)
    alone, shared = shared, replace(shared, ranks=ranks)
    found: dict[str, list[float]] = {"alone_s": [], "together_s": []}
    for turn in range(asked["repeats"] + 1):
        for name, job in (("alone_s", alone), ("together_s", shared)):
            if ranks.first or job is shared:
                seconds = ours.one_pass(job, state)
            if turn:
                found[name].append(seconds if ranks.first or job is shared else 0.0)
            ranks.barrier()
    found["losses"] = [float(x) for x in ours.column(state.history.updates, "loss")]
    ranks.keep_equal(loaded.model, state.optimizer)
    if ranks.first:
        files.write_json(Path(asked["out"]), found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
