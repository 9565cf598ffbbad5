"""From a configuration of `mlx_lm.lora` to an experiment of this project."""
