"""Measure real steps in a process of their own: `python -m stages.core.memory.probe PID`.

Only a process of its own gives honest peaks, and it may die of a point that is too large. PID is
the process that started it, with which it ends. The first line on standard input (JSON) says which
model; each further one lists points. It writes one line per event: `rest` when what rests in memory
changed, `begin` and `reading` for each point; or `refused`, with what the user can mend, and ends.
`stages.core.memory.survey` is the other end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stages.core.config import schema
from stages.core.errors import UserError
from stages.core.machine import device, parent
from stages.core.memory import recovery
from stages.core.memory.points import Point, Reading, point_from


def main() -> int:
    """Answer the requests on standard input until it is closed."""
    parent.watch(lambda: os._exit(1), under_dvc=False, pid=int(sys.argv[1]))
    request = json.loads(sys.stdin.readline())
    kind = device.prepare(request["device"]).kind
    from stages.core.memory.bench import Bench

    train = OmegaConf.merge(OmegaConf.structured(schema.Train), request["train"])
    try:
        bench = Bench(
            Path(request["folder"]),
            request["dtype"],
            OmegaConf.to_object(train),
            vocabulary=request["vocabulary"],
            warm=kind != "cpu",
        )
    except UserError as error:
        answer("refused", error.record())
        return 0
    for line in sys.stdin:
        for point in map(point_from, json.loads(line)["points"]):
            answer("begin", point.record())
            bench.make_ready(point)
            found = reading(bench, point)
            answer("rest", bench.rest.record())
            answer("reading", found.record())
    return 0


def reading(bench: Any, point: Point) -> Reading:
    """The point's reading; an error is one too."""
    try:
        return bench.read(point)
    except Exception as error:
        death = recovery.of_exception(error)
        reason = death.reason if death else f"{type(error).__name__}: {error}"
        return Reading(point, died=reason.splitlines()[0])


def answer(event: str, value: dict[str, Any]) -> None:
    """One line to the other end."""
    sys.stdout.write(json.dumps({"event": event, "value": value}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
