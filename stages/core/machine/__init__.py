"""The machine that runs: its BLAS, device and memory, and processes that share it."""
