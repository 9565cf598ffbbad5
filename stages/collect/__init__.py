"""Rows from files, the Hub or the built-in corpus into one schema and three splits."""
