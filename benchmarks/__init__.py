"""Time and memory beside mlx-lm's own loop, on the same examples, with the losses compared.

python -m benchmarks            see benchmarks/README.md
"""
