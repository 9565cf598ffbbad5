"""commands: what a person runs, not DVC; one module each, with `main(argv) -> int`."""
