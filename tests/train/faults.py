"""The train stage with faults put into its steps: started as a program by the recovery tests.

    FAULTS='[{"update": 3, "kind": "malloc"}]' python tests/train/faults.py [memory.key=value …]

Each fault comes once, also over several children, in the first micro-batch of its update; one that
is `always` comes in every child, one with a `rank` in that rank only (`run.launch`). Nothing of
this is in the stages themselves.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

TEXTS = {
    "malloc": "[malloc] Unable to allocate 1073741824 bytes.",
    "metal": "[metal::malloc] Attempting to allocate 83404284800 bytes which is greater than the"
    " maximum allowed buffer size of 77309411328 bytes.",
    "cuda": "cudaMallocAsync(&data, size, stream) failed: out of memory",
    "handles": "[metal::malloc] Resource limit (499000) exceeded.",
}
ABORT = b"""libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] \
Command buffer execution failed: Insufficient Memory (00000008:\
kIOGPUCommandBufferCallbackErrorOutOfMemory)
"""
DONE = Path("faults_done")


def supervise(words):
    """Be the supervisor, whose children are this program too."""
    from stages.train import __main__
    from stages.train.recovery import supervisor

    def command(settings, _overrides):
        role = "launch" if settings.run.launch.workers() > 1 else "child"
        return [sys.executable, __file__, f"--{role}={os.getpid()}", *words]

    supervisor.child_command = command
    return __main__.main(words)


def start_ranks(words):
    """Be the process that starts several children, which are this program too."""
    from stages.core.machine import launch
    from stages.train import __main__

    plain = launch.run
    launch.run = lambda its, command, *rest: plain(its, [command[0], __file__, *command[3:]], *rest)
    return __main__.main(words)


def work(words):
    """Be the child, with the faults that have not come yet."""
    from stages.core.machine import device

    device.load_blas()
    from stages.core.update import step
    from stages.train import __main__, optimizer
    from stages.train.recovery import guard

    faults = json.loads(os.environ.get("FAULTS", "[]"))
    state = {"update": 0}

    def due(*kinds):
        """The first fault of this update that has not come yet."""
        done = DONE.read_text().split() if DONE.exists() else []
        for number, fault in enumerate(faults):
            right = fault["update"] == state["update"] and fault["kind"] in kinds
            right = right and fault.get("rank") in (None, os.environ.get("MLX_RANK"))
            if right and (str(number) not in done or fault.get("always")):
                with open(DONE, "a") as file:
                    file.write(f"{number}\n")
                return fault
        return None

    plain_update, plain_loss, plain_apply = guard.Guard.update, step.Step._loss, optimizer.apply

    def update(self, number, ids, run):
        state["update"] = number
        strike(due("address"))
        return plain_update(self, number, ids, run)

    def loss(self, parameters, inputs):
        self.model.update(parameters)  # as the real one begins: the model holds traced arrays now
        if state["update"]:
            strike(due(*TEXTS, "numpy", "kill", "abort", "hang"))
        return plain_loss(self, parameters, inputs)

    def apply(*args):
        if due("optimizer"):
            raise RuntimeError(TEXTS["cuda"])
        return plain_apply(*args)

    def target_losses(*args, **kwargs):
        if state["update"] and due("validation"):
            raise RuntimeError(TEXTS["malloc"])
        return plain_losses(*args, **kwargs)

    plain_losses = step.target_losses
    step.target_losses = target_losses
    guard.Guard.update, step.Step._loss, optimizer.apply = update, loss, apply
    return __main__.main(words)


def strike(fault):
    """What goes wrong; None: nothing."""
    if fault is None:
        return
    kind = fault["kind"]
    if kind in TEXTS:
        raise RuntimeError(TEXTS[kind])
    if kind == "numpy":
        raise MemoryError("Unable to allocate 7.45 TiB for an array")
    if kind == "kill":
        delay = fault.get("after_s", 0.0)
        if not delay:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if kind == "abort":
        os.write(2, ABORT)
        os.abort()
    if kind == "hang":
        time.sleep(600)
    if kind == "address":
        most = psutil.Process().memory_info().vms + fault["bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    given = sys.argv[1:]
    role = next((word.split("=")[0] for word in given if word.startswith("--")), "")
    main = {"": supervise, "--child": work, "--launch": start_ranks}[role]
    raise SystemExit(main(given))
