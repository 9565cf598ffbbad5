"""The process that trains. It loads BLAS and device first; what needs MLX is in session.py."""

from __future__ import annotations

from stages.core import console
from stages.core.config.settings import Settings
from stages.core.machine import device
from stages.core.machine.lock import locked
from stages.train.identity import checkpoints, run_fingerprint
from stages.train.stopping import Stop

WAIT_S = 30.0
"""For the child of an earlier run that still writes its last checkpoint."""


def run(settings: Settings, parent: int) -> None:
    """Train, and write adapters/ and reports/train/.

    Args:
        settings: Of this run.
        parent: Process id of the supervisor; this process ends with it.

    Raises:
        UserError: Something the user can mend.
        RunFailed: A loss, gradient or weight was not finite.
        Stopped: A signal arrived; a checkpoint is written.
    """
    stop = Stop()
    stop.with_parent(parent)
    chosen = device.prepare(settings.run.device, measure=True)
    console.say(chosen.line())
    from stages.train.session import Session

    name = run_fingerprint(settings)
    folder = checkpoints(name)
    with locked(folder / "working", "this run's checkpoints", WAIT_S):
        session = Session(settings, chosen, folder, stop)
        session.announce()
        stop.listen()
        session.train()
        session.finish()
