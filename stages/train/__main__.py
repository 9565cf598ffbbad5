"""`python -m stages.train`: a light process that watches over the one that trains.

The working child (`--child=<pid of its parent>`) imports MLX and does everything else.
"""

import sys
from collections.abc import Sequence

from stages.core import entry

CHILD = "--child="


def main(argv: Sequence[str]) -> int:
    """Supervise, or be the working child; gives the exit status."""
    overrides = [word for word in argv if not word.startswith(CHILD)]
    if len(overrides) < len(argv):
        from stages.train import child

        parent = next(int(word.removeprefix(CHILD)) for word in argv if word.startswith(CHILD))
        return entry.stage("train", lambda settings: child.run(settings, parent), overrides)
    from stages.train import supervisor

    return entry.stage("train", lambda settings: supervisor.run(settings, overrides), overrides)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
