"""One measurement in a process of its own: `python -m benchmarks.child SPEC RESULT`.

Only a fresh process has an honest peak of memory, and mlx-lm's checkpointing changes classes for
good.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.spec import OURS, Spec, from_text
from stages.core import console, entry, files
from stages.core.machine import device


def main(argv: Sequence[str]) -> int:
    """Measure what the spec says and write the result as JSON."""
    spec, result = from_text(argv[0]), Path(argv[1])
    return entry.guarded("benchmark", lambda: files.write_json(result, measured(spec)))


def measured(spec: Spec) -> dict[str, Any]:
    """The figures of one run."""
    os.environ.update(spec.environment)
    chosen = device.prepare(spec.kind, measure=True, tuned=spec.side == OURS or spec.tuned)
    console.say(chosen.line())
    from benchmarks import ours, theirs
    from benchmarks import subject as subjects
    from stages.core.layers.guard import perturbed_adapters

    settings = subjects.settings_of(spec)
    if spec.side != OURS:
        subject = subjects.load(spec, chosen, settings, lazy=False)
        with perturbed_adapters(subject.model):
            found = theirs.measure(subject, spec)
    else:
        manifest, examples = subjects.manifest_of(spec), subjects.examples_of(spec)
        started = time.perf_counter()
        plan = subjects.equal_rows(spec, manifest, examples, chosen.kind)
        if spec.planned:
            from stages.core.memory.choose import choose

            plan = choose(settings, manifest, examples, ours.no_examples(), chosen).plan
        plan_s = time.perf_counter() - started
        subject = subjects.load(spec, chosen, settings, lazy=plan.activation_cache)
        with perturbed_adapters(subject.model):
            found = {**ours.measure(subject, plan, spec), "plan_s": plan_s}
    return {
        **found,
        "spec": asdict(spec),
        "device": chosen.record(),
        "dtype": subject.manifest.dtype,
        "trained_layers": subject.attached.num_layers_trained,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
