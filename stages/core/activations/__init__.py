"""The activation cache: what the frozen layers give, computed once and kept on disk.

    store = prepare(source, {"train": examples, "valid": valid})     # or None: off, in one line
    with take_over(step, store["train"], micro): the lower weights are gone
    step.gradient(micro, divisor, total, store["train"].boundary(micro))

Modules: size (how much, whether; no MLX), identity (the folder's name), layout (the bytes of a
token), shards (files of examples), build, evict, reader, handover (check, then free), prepare.
"""
