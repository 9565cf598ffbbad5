"""One self-contained HTML page about the run, and the adapter's card."""
