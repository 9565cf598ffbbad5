"""Deaths are told apart, and plans get smaller until there is no smaller one."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from stages.core.memory import recovery
from stages.core.memory.plan import Plan
from stages.core.memory.recovery import Marker

GB = 10**9
NEAR = Marker(update=7, rows=4, width=512, needed_bytes=9 * GB, limit_bytes=10 * GB)
FAR = Marker(update=7, rows=4, width=512, needed_bytes=2 * GB, limit_bytes=10 * GB)
FREE = Marker(update=7, rows=4, width=512, needed_bytes=9 * GB, limit_bytes=None)
METAL = (
    "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command"
    " buffer execution failed: Insufficient Memory"
    " (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


@pytest.mark.parametrize(
    ("text", "kind", "retry"),
    [
        (METAL, "memory", "smaller"),
        ("[malloc] Unable to allocate 1073741824 bytes.", "memory", "smaller"),
        (
            "[metal::malloc] Attempting to allocate 83404284800 bytes which is greater than the"
            " maximum allowed buffer size of 77309411328 bytes.",
            "memory",
            "smaller",
        ),
        ("cudaMallocAsync(&data, size, stream) failed: out of memory", "memory", "smaller"),
        ("CUDA_ERROR_OUT_OF_MEMORY", "memory", "smaller"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "memory", "smaller"),
        ("[metal::malloc] Resource limit (499000) exceeded.", "handles", "same"),
        (
            "[METAL] Command buffer execution failed: Impacting Interactivity"
            " (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
            "watchdog",
            "smaller",
        ),
        (
            "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
            " (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
            "watchdog",
            "smaller",
        ),
    ],
)
def test_texts_of_metal_cuda_and_mlx(text, kind, retry):
    found = recovery.of_exception(RuntimeError(text))
    assert (found.kind, found.retry) == (kind, retry)
    died = recovery.of_process(-signal.SIGABRT, None, f"Traceback\n{text}\n")
    assert (died.kind, died.retry) == (kind, retry)
    assert text[:30] in died.reason


def test_numpy_out_of_memory():
    import numpy as np

    with pytest.raises(MemoryError) as caught:
        np.empty(10**15)
    assert recovery.of_exception(caught.value).retry == "smaller"


@pytest.mark.parametrize(
    "error", [ValueError("shapes do not match"), RuntimeError("[matmul] last dim"), KeyError("x")]
)
def test_other_exceptions_are_not_memory(error):
    assert recovery.of_exception(error) is None


@pytest.mark.parametrize(
    ("returncode", "marker", "oom_kills", "kind", "retry"),
    [
        (-9, NEAR, 1, "memory", "smaller"),
        (-9, None, 1, "memory", "smaller"),
        (-9, FAR, 0, "memory", "smaller"),
        (-9, None, 0, "killed", "same"),
        (-11, NEAR, 0, "memory", "smaller"),
        (-6, NEAR, 0, "memory", "smaller"),
        (-11, FAR, 0, "crash", "none"),
        (-11, FREE, 0, "crash", "none"),
        (-11, None, 0, "crash", "none"),
        (-4, NEAR, 0, "crash", "none"),
        (-15, NEAR, 0, "crash", "none"),
        (1, NEAR, 0, "error", "none"),
    ],
)
def test_how_a_process_ended(returncode, marker, oom_kills, kind, retry):
    found = recovery.of_process(returncode, marker, "", oom_kills)
    assert (found.kind, found.retry) == (kind, retry)


def test_a_real_address_space_limit_ends_in_sigsegv_or_an_error():
    """MLX on the CPU does not raise when malloc fails: only the marker can tell why it died."""
    code = (
        "import resource, mlx.core as mx\n"
        "mx.eval(mx.zeros((10,)))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "mx.eval(mx.zeros((1 << 30,), mx.float32) + 1)\n"
    )
    if sys.platform != "linux":
        pytest.skip("address-space limits work on Linux only")
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    found = recovery.of_process(ended.returncode, NEAR, ended.stderr)
    assert ended.returncode != 0
    assert (found.kind, found.retry) == ("memory", "smaller")


def chain(plan, rows, width):
    plans = []
    while plan is not None:
        plans.append(plan)
        assert len(plans) < 50
        rows = min(rows, plan.batch_size)
        plan = recovery.next_smaller(plan, rows, width)
    return plans


def test_rows_halve_down_to_one_then_layers_are_recomputed():
    plans = chain(Plan(batch_size=8, batch_tokens=4096, widths=(512,), loss_chunk=128), 8, 512)
    assert [plan.batch_size for plan in plans[:4]] == [8, 4, 2, 1]
    assert [plan.batch_tokens for plan in plans[:4]] == [4096, 2048, 1024, 512]
    assert [plan.recompute for plan in plans[4:6]] == [2, 1]
    assert [plan.attention_block for plan in plans[6:10]] == [256, 128, 64, 32]
    assert [plan.loss_chunk for plan in plans[10:]] == [64, 32, 16]
    assert all(plan.recompute == 1 for plan in plans[5:])


def test_a_plan_by_tokens_gets_smaller_from_what_it_really_held():
    plan = Plan(batch_size=64, batch_tokens=100_000, widths=(512,))
    smaller = recovery.next_smaller(plan, 6, 512)
    assert (smaller.batch_size, smaller.batch_tokens) == (3, 3 * 512)


def test_one_piece_of_loss_becomes_pieces():
    plan = Plan(1, 64, (64,), recompute=1, attention_block=32, loss_chunk=0)
    assert [found.loss_chunk for found in chain(plan, 1, 64)] == [0, 128, 64, 32, 16]


def test_every_fourth_layer_becomes_every_second():
    plan = Plan(1, 64, (64,), recompute=4)
    assert [found.recompute for found in chain(plan, 1, 64)][:3] == [4, 2, 1]


def test_the_smallest_plan_has_none_below_it():
    plan = Plan(1, 64, (64,), recompute=1, attention_block=32, loss_chunk=16)
    assert recovery.next_smaller(plan, 1, 64) is None


def test_plans_that_failed_are_passed_over():
    plan = Plan(1, 64, (64,))
    first = recovery.next_smaller(plan, 1, 64)
    second = recovery.next_smaller(plan, 1, 64, [first])
    assert first.recompute == 2
    assert (second.recompute, second.attention_block) == (0, 32)
    assert recovery.next_smaller(second, 1, 64).recompute == 2
    assert recovery.next_smaller(second, 1, 64, [replace(second, recompute=2)]).loss_chunk == 64


def test_the_event_names_what_changed():
    plan = Plan(8, 4096, (512,), predicted_peak_gb=3.0, predicted_seconds=1.0)
    smaller = recovery.next_smaller(plan, 8, 512)
    assert (smaller.predicted_peak_gb, smaller.predicted_seconds) == (None, None)
    death = recovery.of_process(-9, NEAR, "", 1)
    entry = recovery.event(death, 7, plan, smaller)
    assert entry["changed"] == {"batch_size": [8, 4], "batch_tokens": [4096, 2048]}
    assert entry["update"] == 7
    assert entry["kind"] == "memory"
