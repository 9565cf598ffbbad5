"""samestep: fine-tune language models with MLX as a DVC pipeline. One package per stage."""

import sys


def _environment_problem():
    """Say what is wrong with this interpreter, or None. Plain syntax: an old Python reads this."""
    if sys.version_info < (3, 11):
        return "Python %d.%d is too old, 3.11 or later is needed" % sys.version_info[:2]
    from importlib.util import find_spec

    missing = [name for name in ("omegaconf", "pyarrow", "rich", "mlx") if find_spec(name) is None]
    if missing:
        return "packages are missing in %s: %s" % (sys.executable, ", ".join(missing))
    return None


_problem = _environment_problem()
if _problem:
    sys.stderr.write(
        "\nerror: %s\n  to do:    `make setup` once, then `source .venv/bin/activate` in this"
        " shell (or `make repro`, which does both)\n" % _problem
    )
    raise SystemExit(2)
