"""Rows to tokens and target masks, by the model's own tokenizer and chat template."""
