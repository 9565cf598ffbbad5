"""The one way into the layers of any mlx-lm model: stubs in place, freed layers, checks."""
