"""What two or more stages share. Beside files, tables, paths, the console and how a process ends:

config       the settings: keys, ranges, how a run gets them
model        the base model: where it comes from, how it is loaded, its tokenizer
layers       the one way into the layers of any mlx-lm model
update       the exact update: what trains, how a batch is cut, loss and gradient
memory       memory settings and the plan of a run
activations  the output of the frozen layers, kept on disk
machine      BLAS, device, memory as the system counts it, locks
"""
