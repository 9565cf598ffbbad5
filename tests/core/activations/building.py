"""A process of its own that builds activations; the tests kill it, or start two of them.

python building.py FOLDER PAUSE [unchecked]

Prints `ready`, waits for a line, prints `micro` before each micro-batch, then `done`.

unchecked: as if the disk had room.
"""

import os
import sys
import time

SHARD_BYTES = 4096
LENGTHS = tuple(range(4, 34))


def prepared(pause=0.0):
    """Build in the current directory; returns the store, and how many micro-batches ran."""
    from stages.core.activations import shards
    from stages.core.activations.prepare import prepare
    from tests.core.activations.made import examples, lora_model, source

    shards.LEAST_BYTES = SHARD_BYTES
    ran = []

    def between():
        ran.append(1)
        print("micro", flush=True)
        time.sleep(pause)

    origin = source(lora_model(cut=2), 2)
    stores = prepare(origin, {"train": examples(LENGTHS)}, between) or {}
    origin.staged.close()
    return stores.get("train"), len(ran)


if __name__ == "__main__":
    from stages.core.machine import device

    device.load_blas()
    os.chdir(sys.argv[1])
    if sys.argv[3:] == ["unchecked"]:
        from stages.core.activations import prepare as module

        module.make_room = lambda *_: ""
    print("ready", flush=True)
    sys.stdin.readline()
    made, _ = prepared(float(sys.argv[2]))
    print("done", made.folder.name if made else "without", flush=True)
