"""core: what two or more stages share."""
