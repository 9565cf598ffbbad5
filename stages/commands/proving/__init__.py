"""The proof behind `python -m stages prove`: real examples, plain references, comparisons."""
