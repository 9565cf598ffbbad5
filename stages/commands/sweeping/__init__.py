"""A sweep: Hydra makes the points, each one is a `dvc exp run --temp`, the results are compared."""
