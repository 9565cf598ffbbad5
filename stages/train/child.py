"""The process that trains. It loads BLAS and device first; what needs MLX is in session.py."""

from __future__ import annotations

from contextlib import nullcontext as free
from typing import TYPE_CHECKING

from stages.core import console
from stages.core.config.settings import Settings
from stages.core.machine import device
from stages.core.machine.launch import completed
from stages.core.machine.lock import locked
from stages.core.memory import recovery
from stages.train.identity import checkpoints, run_fingerprint
from stages.train.recovery.ledger import STATUS, HandOver, hand_over
from stages.train.stopping import Stop

if TYPE_CHECKING:
    from stages.train.ranks.alone import Alone
    from stages.train.session import Session

WAIT_S = 30.0
"""For the child of an earlier run that still writes its last checkpoint."""


def run(settings: Settings, parent: int) -> None:
    """Train, and write adapters/ and reports/train/.

    Args:
        settings: Of this run.
        parent: Process id of who started it; this process ends with that one. 0: whoever it is.

    Raises:
        UserError: Something the user can mend.
        RunFailed: A loss, gradient or weight was not finite.
        Stopped: A signal arrived; a checkpoint is written.
        SystemExit: With `ledger.STATUS`: out of memory, another process is to go on.
    """
    stop = Stop()
    stop.with_parent(parent or None)
    chosen = device.prepare(settings.run.device, measure=True)
    from stages.train.session import Session

    name = run_fingerprint(settings)
    folder = checkpoints(name)
    ranks = joined(settings, name)
    console.say(chosen.line())
    with locked(folder / "working", "this run's checkpoints", WAIT_S) if ranks.first else free():
        session = None
        try:
            session = Session(settings, chosen, folder, stop, ranks)
            session.announce()
            stop.listen()
            session.train()
            session.finish()
        except Exception as error:
            if (found := cause(error, session)) is None:
                raise
            hand_over(folder, found)
            raise SystemExit(STATUS) from None
        if ranks.first:
            completed(folder)


def joined(settings: Settings, name: str) -> Alone:
    """The other processes of this run, once they are there; only the first one is to be heard.

    Args:
        name: Fingerprint of the run.
    """
    from stages.train.ranks.alone import ALONE
    from stages.train.ranks.several import join

    if settings.run.launch.workers() == 1:
        return ALONE
    ranks = join(settings.run.launch)
    if not ranks.first:
        console.quiet()
    ranks.require_equal("examples, model, engine or settings", name)
    return ranks


def cause(error: Exception, session: Session | None) -> HandOver | None:
    """What to tell the supervisor: None where memory is not what went wrong.

    An exception outside the gradient phase (loading, the optimizer's step, a checkpoint) may have
    left half a state, so this process ends, and the next one goes on from the last checkpoint.
    """
    if isinstance(error, HandOver):
        return error
    death = recovery.of_exception(error)
    if death is None:
        return None
    return HandOver(death, None if session is None else session.guard.marker.last)
