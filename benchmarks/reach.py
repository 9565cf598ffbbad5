"""Time to a given validation loss, mlx-lm's loop beside ours: `python -m benchmarks.reach`.

Both train the same examples from the same adapters at one learning rate, with the same number of
examples an update, in a process each; after every update the trained arrays are kept, outside the
clock. Then a third process gives the validation loss of every one of them, by one function. The
loss to reach is that of mlx-lm's last update. Orders of examples differ between the sides, and so
does the mean over an update (mlx-lm: of micro-batches' means), so the curves are told too.

The clock holds, on our side, the check of the plan and the making of the activation cache; on
neither side the load of the model. Ours runs under the plan by rule, as a run this short does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import choice, figures, machine, workspace
from benchmarks.spec import OURS, THEIRS, Spec, from_text
from stages.core import console, entry, files
from stages.core.machine import device
from stages.core.tables import read_examples

RATE, VALID_ROWS = 1e-4, 8
PASSES, MORE = 2, 1
"""Of mlx-lm, and how many more of ours: its loss may be reached later."""
SAME_START = 1e-5


def main(argv: Sequence[str]) -> int:
    """Take the figure and write `<out>/reach.json`, or be a process that measures."""
    if given := workspace.asked_of(list(argv)):
        asked, result = given
        return entry.guarded("benchmarks", lambda: files.write_json(result, measured(asked)))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reach", description=__doc__)
    parser.add_argument("--learning-rate", type=float, default=RATE)
    parser.add_argument("--passes", type=int, default=PASSES, help=f"of mlx-lm; ours {MORE} more")
    parser.add_argument("--quick", action="store_true", help="the tiny model: does it run?")
    parser.add_argument("--out", type=Path)
    return entry.guarded("benchmarks", lambda: _take(parser.parse_args(argv)))


def _take(given: argparse.Namespace) -> int:
    folder = workspace.make("tiny" if given.quick else "smollm2")
    job = figures.quick(folder) if given.quick else figures.Job(folder)
    spec = replace(
        Spec(THEIRS, figures.real(job), job.cap, job.usual, passes=given.passes),
        learning_rate=given.learning_rate,
    )
    ours = replace(spec, side=OURS, passes=given.passes + MORE)
    report: dict[str, Any] = {"kind": "reach", "machine": machine.facts(), "spec": asdict(spec)}
    sides, kept = {}, {}
    for name, side in (("mlx-lm", spec), ("ours", ours)):
        kept[name] = f"kept-{side.side}"
        asked = {"spec": side.text(), "kept": kept[name]}
        sides[name] = workspace.measured(folder, "benchmarks.reach", asked)
        last = sides[name]["curve"][-1]
        console.say(f"{name}: {last['update']} updates in {last['seconds']:.1f} s")
    valid = "examples-valid.parquet"
    rows = choice.usable(read_examples(folder / "data/examples/valid.parquet"), job.cap)
    choice.write(folder / valid, choice.spread(rows, min(VALID_ROWS, len(rows))))
    asked = {"spec": replace(spec, examples=valid).text(), "losses_of": kept}
    found = workspace.measured(folder, "benchmarks.reach", asked)
    report |= compared(sides, found["losses"])
    report |= {"device": found["device"], "words": _words(spec, len(rows))}
    out = given.out or (workspace.WORK / "quick" if given.quick else machine.RESULTS)
    files.write_json(out / "reach.json", report)
    for name, side in report["sides"].items():
        console.say(f"{name}: below {report['loss']:.5f} after {side['reached_s']} s")
    starts = [side["curve"][0]["loss"] for side in report["sides"].values()]
    if abs(starts[0] - starts[1]) > SAME_START * starts[0]:
        console.fail([f"The sides start from different adapters: {starts}"])
        return entry.FAILED
    return entry.DONE


def _words(spec: Spec, valid: int) -> str:
    return (
        f"{spec.effective} examples an update, learning rate {spec.learning_rate:g},"
        f" {min(VALID_ROWS, valid)} validation rows; our clock holds the making of the activation"
        " cache. Orders of examples differ between the sides."
    )


def compared(
    sides: Mapping[str, Mapping[str, Any]], losses: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The curve of each side, and when it was below the first side's last loss."""
    found = {}
    for name, side in sides.items():
        curve = [
            {**point, "loss": loss} for point, loss in zip(side["curve"], losses[name], strict=True)
        ]
        found[name] = {**side, "curve": curve}
    first = next(iter(found.values()))
    loss = first["curve"][-1]["loss"]
    for side in found.values():
        side["reached_s"] = reached(side["curve"], loss)
    for side in found.values():
        known = side["reached_s"] is not None and side["reached_s"] > 0
        side["times_faster"] = first["reached_s"] / side["reached_s"] if known else None
    return {"loss": loss, "sides": found}


def reached(curve: Sequence[Mapping[str, float]], loss: float) -> float | None:
    """Seconds of the first point at or below a loss; None where there is none."""
    return next((point["seconds"] for point in curve if point["loss"] <= loss), None)


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """One side's updates, or the losses of all that was kept, in this process."""
    spec = from_text(asked["spec"])
    chosen = device.prepare(spec.kind, measure=True, tuned=spec.side == OURS)
    from benchmarks import learning

    if "losses_of" in asked:
        found = learning.losses(spec, chosen, asked["losses_of"])
        return {"losses": found, "device": chosen.record()}
    train = learning.ours if spec.side == OURS else learning.theirs
    return train(spec, chosen, Path(asked["kept"]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
