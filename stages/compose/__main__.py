"""Compose conf/ into params.yaml: `python -m stages.compose [key=value …]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.compose import keys, workspace
from stages.core import entry


def main(argv: Sequence[str]) -> int:
    """Read the command line and write (under `dvc exp run`: only check) params.yaml."""
    parser = argparse.ArgumentParser(
        prog="python -m stages.compose",
        description="Compose conf/ into params.yaml and print what changed.",
        epilog=keys.listing() if {"-h", "--help"} & set(argv) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as in `dvc exp run -S key=value`"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--keep",
        metavar="NAME",
        help="write the values of an applied experiment to conf/experiment/NAME.yaml, select it",
    )
    choice.add_argument(
        "--drop", action="store_true", help="forget the values of an applied experiment"
    )
    given = parser.parse_args(argv)
    if given.overrides and (given.keep or given.drop):
        parser.error("--keep and --drop take no key=value")
    here = Path.cwd()
    if os.environ.get("DVC_EXP_NAME"):
        return entry.guarded("compose", lambda: workspace.check(here))
    by_hand = "DVC_STAGE" not in os.environ
    return entry.guarded(
        "compose",
        lambda: workspace.write(
            here, given.overrides, keep=given.keep, drop=given.drop, by_hand=by_hand
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
