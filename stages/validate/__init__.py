"""All that can be known before weights load, all problems at once."""
