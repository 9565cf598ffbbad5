"""Let mlx-lm's models call other functions of the same meaning, for the time of a computation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def replaced(name: str, original: Callable, replacement: Callable) -> Iterator[None]:
    """Put `replacement` where modules of mlx_lm.models hold `original` under `name`.

    Models import their helpers by name, so each module has its own reference. Put the context
    around the whole `value_and_grad`: layers may be recomputed in the backward pass.
    """
    found = [m for key, m in list(sys.modules.items()) if key.startswith("mlx_lm.models.") and m]
    modules = [m for m in found if m.__dict__.get(name) is original]
    try:
        for module in modules:
            setattr(module, name, replacement)
        yield
    finally:
        for module in modules:
            setattr(module, name, original)
