"""`python -m stages.train`: a light process that watches over the one that trains.

The working child (`--child=<pid of its parent>`) imports MLX and does everything else. Several of
them (`run.launch`) are started by one more process (`--launch=<pid of its parent>`).
"""

import sys
from collections.abc import Sequence

from stages.core import entry
from stages.core.config.settings import Settings

CHILD, LAUNCH = "--child=", "--launch="


def main(argv: Sequence[str]) -> int:
    """Supervise, be the working child, or start several of those; gives the exit status."""
    overrides = [word for word in argv if not word.startswith((CHILD, LAUNCH))]
    role = next((word for word in argv if word.startswith((CHILD, LAUNCH))), "")
    parent = int(role.partition("=")[2] or 0)
    return entry.stage(
        "train", lambda settings: _work(role, settings, parent, overrides), overrides
    )


def _work(role: str, settings: Settings, parent: int, overrides: Sequence[str]) -> int | None:
    if role.startswith(CHILD):
        from stages.train import child

        return child.run(settings, parent)
    if role.startswith(LAUNCH):
        from stages.train.ranks import launching

        return launching.run(settings, parent, overrides)
    from stages.train.recovery import supervisor

    return supervisor.run(settings, overrides)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
