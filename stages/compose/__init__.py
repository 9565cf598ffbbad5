"""compose: conf/ → params.yaml, byte for byte what DVC itself would write."""
