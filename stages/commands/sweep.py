"""Try out values: each point one DVC experiment, compared in reports/sweeps/."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from stages.core import console, entry, paths
from stages.core.errors import RunFailed
from stages.core.machine.lock import locked

if TYPE_CHECKING:
    from stages.commands.sweeping.multirun import Plan
    from stages.commands.sweeping.points import Sweep
    from stages.commands.sweeping.state import State

EPILOG = """examples:
  python -m stages sweep -m train.learning_rate=1e-4,3e-4 train.lora_parameters.rank=4,8
  python -m stages sweep sweep=learning_rate            the presets lie in conf/sweep
  python -m stages sweep sweep=layers hydra/launcher=joblib hydra.launcher.n_jobs=2
  python -m stages sweep --apply learning_rate-3e-4     take a point into the workspace and conf/

The same line again goes on where it was stopped; docs/sweeps.md tells more."""


def main(argv: Sequence[str]) -> int:
    """Run or apply; 1 where a point failed."""
    parser = argparse.ArgumentParser(
        prog="python -m stages sweep",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="may be said, as in Hydra")
    parser.add_argument("--name", help="of the sweep; default: the preset's or the swept keys'")
    parser.add_argument("--apply", metavar="EXPERIMENT", help="take a finished point")
    parser.add_argument("--keep", metavar="NAME", help="with --apply: conf/experiment/NAME.yaml")
    parser.add_argument("words", nargs="*", metavar="key=v1,v2", help="Hydra's override grammar")
    given = parser.parse_intermixed_args(argv)
    if given.apply:
        if given.words or given.name:
            parser.error("--apply takes the name of an experiment only")
        return entry.guarded("sweep", lambda: _apply(given.apply, given.keep))
    return entry.guarded("sweep", lambda: _sweep(given.words, given.name))


def _apply(experiment: str, name: str | None) -> None:
    from stages.commands.sweeping import applying

    applying.apply(paths.here(), experiment, name)


def _sweep(words: Sequence[str], name: str | None) -> None:
    from stages.commands.sweeping import ahead, checks, multirun, results, view

    root = paths.here().resolve()
    checks.require_ready(root)
    plan = multirun.plan(root, words, name)
    checks.require_settings(root, plan)
    sweep = plan.sweep
    with locked(sweep.folder / "lock", f"the sweep {sweep.name}"):
        sweep.stop_file.unlink(missing_ok=True)
        _announce(plan)
        began = time.time()
        _listen(sweep)
        error: RuntimeError | entry.Stopped | None = None
        try:
            with view.shown(sweep, plan.points):
                multirun.run(plan, words)
        except (RuntimeError, entry.Stopped) as caught:
            error = caught
        finally:
            ahead.end()
        states = view.current(sweep, plan.points, began)
        table = results.collect(sweep, states)
        folder = results.write(sweep, table)
    results.leaderboard(sweep, table)
    console.say(f"{folder.relative_to(root)}: points.csv, points.parquet, sweep.html")
    if isinstance(error, RuntimeError):
        raise _failure(states) or error
    if error is not None:
        raise error


def _announce(plan: Plan) -> None:
    points, sweep = plan.points, plan.sweep
    count = "points that its sweeper chooses" if points is None else f"{len(points)} points"
    console.say(f"sweep {sweep.name}: {count}; their logs lie in {sweep.folder}/points")
    if plan.at_once > 1:
        console.say(
            f"{plan.at_once} points run at a time and share this machine: give each its part of"
            " the memory, as memory.budget_gb=… on this line"
        )


def _listen(sweep: Sweep) -> None:
    """On Ctrl-C or SIGTERM let running points write their checkpoints, then end."""
    from stages.commands.sweeping import job, state

    def stop(number: int, _frame: FrameType | None) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, stop_now)
        sweep.stop_file.touch()
        if job.here == 0:
            state.wait_until_free(sweep.folder, job.GRACE_S)
        raise entry.Stopped(number)

    def stop_now(number: int, _frame: FrameType | None) -> None:
        raise entry.Stopped(number)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, stop)


def _failure(states: Sequence[State]) -> RunFailed | None:
    """The reasons of all points that failed, None where none did."""
    failed = [one for one in states if one.state == "failed"]
    if not failed:
        return None
    return RunFailed(
        f"{len(failed)} of {len(states)} points failed",
        found="\n            ".join(f"{one.label}: {one.reason}" for one in failed),
        fix="mend it and give the same line again: what is done is not run again",
    )
