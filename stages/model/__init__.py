"""The model stage: base model → data/model.json, its hashes and facts."""
