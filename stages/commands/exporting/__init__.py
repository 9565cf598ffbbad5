"""What `python -m stages export` writes, and how it is checked."""
