"""Long rows to examples under one cap, with a report of what survived."""
