"""Settings: the schema, the ranges of its values, and how a run gets them."""
