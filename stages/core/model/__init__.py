"""The base model: where it comes from, what it is, how it is loaded, its tokenizer."""
