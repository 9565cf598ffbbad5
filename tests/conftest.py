"""What every test needs before MLX is imported: the BLAS, and the project's root on the path."""

from stages.core import device

device.load_blas()
