"""What every test needs before MLX is imported: the BLAS, with one thread for these small models.

Tests run side by side, and threads that wait for each other cost five times the work itself.
"""

import os

from stages.core.machine import device

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
device.load_blas()
