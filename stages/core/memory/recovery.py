"""What killed a step, and the next smaller plan: pure functions for whoever supervises the work.

Out of memory shows in many ways. MLX raises RuntimeError; on Metal the process aborts (SIGABRT)
with a text on stderr; under an address-space limit MLX on the CPU dies with SIGSEGV; the kernel
sends SIGKILL, and the cgroup's oom_kill counter grows. A marker that the child writes before each
step ("about to start, so much needed, so much there is") tells these from other crashes.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from stages.core.memory.plan import Plan

TEXTS = (
    "insufficient memory",
    "outofmemory",
    "out of memory",
    "out_of_memory",
    "unable to allocate",
    "attempting to allocate",
    "cudaerrormemoryallocation",
    "bad_alloc",
    "cannot allocate memory",
)
"""Texts of Metal, CUDA, MLX's allocators and the C++ library, in lower case."""

HANDLES = ("resource limit",)
"""Metal counts buffers too: "Resource limit (499000) exceeded". A fresh process has none open."""

WATCHDOG = ("kiogpucommandbuffercallbackerrortimeout", "impacting interactivity", "gpu timeout")
"""macOS ends a GPU command that takes too long: a smaller micro-batch makes shorter ones."""

NEAR = 0.8
"""Share of the limit that a step must have needed for a crash signal to count as memory."""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)

SMALLEST_CHUNK = 16
BLOCKS = (256, 128, 64, 32)


@dataclass(frozen=True)
class Marker:
    """What the child writes before a step, and removes after it.

    Attributes:
        update: Its number, from 1.
        rows, width: Of the micro-batch about to run.
        needed_bytes: What the process will hold at the step's peak, by the plan.
        limit_bytes: The tightest limit on that, or None where there is none.
    """

    update: int
    rows: int
    width: int
    needed_bytes: int
    limit_bytes: int | None

    def record(self) -> dict[str, Any]:
        """The marker as JSON-like values."""
        return asdict(self)


@dataclass(frozen=True)
class Death:
    """Why the work ended, and what to do about it.

    Attributes:
        kind: `memory`, `watchdog`, `handles`, `killed`, `crash`, `error` or `hang`.
        reason: One line for a person and for run.json.
        retry: `smaller`: the same update under the next smaller plan; `same`: under the same plan;
            `none`: report it.
    """

    kind: str
    reason: str
    retry: str


def of_exception(error: BaseException) -> Death | None:
    """The death that an exception in the working process means, None where it isn't memory's."""
    if isinstance(error, MemoryError):
        return Death("memory", f"out of memory: {error or 'MemoryError'}", "smaller")
    if isinstance(error, RuntimeError | ValueError | OSError):
        return of_text(str(error))
    return None


def of_text(text: str) -> Death | None:
    """The death that a text of MLX, Metal, CUDA or C++ means, None where it means none of these."""
    for line in text.splitlines():
        lower = line.lower()
        short = line.strip()[:200]
        if any(known in lower for known in TEXTS):
            return Death("memory", f"out of memory: {short}", "smaller")
        if any(known in lower for known in WATCHDOG):
            return Death("watchdog", f"the system ended a long GPU command: {short}", "smaller")
        if any(known in lower for known in HANDLES):
            return Death("handles", f"too many buffers open: {short}", "same")
    return None


def of_process(
    returncode: int, marker: Marker | None = None, stderr: str = "", oom_kills: int = 0
) -> Death:
    """Why a working process ended.

    Args:
        returncode: As `subprocess` gives it: minus the signal's number where one ended it.
        marker: What it left behind, None where no step was running.
        stderr: The last lines it wrote there.
        oom_kills: By how much the kernel's count of processes killed for memory grew meanwhile.
    """
    by_text = of_text(stderr)
    if by_text is not None:
        return by_text
    if returncode >= 0:
        return Death("error", f"it ended with status {returncode}", "none")
    name = signal.Signals(-returncode).name
    if returncode == -signal.SIGKILL:
        return _killed(marker, oom_kills)
    if -returncode in CRASHES and marker is not None and _near_limit(marker):
        needed, limit = marker.needed_bytes / 1e9, (marker.limit_bytes or 0) / 1e9
        reason = f"{name} in a step that needed {needed:.2f} GB of {limit:.2f} GB: out of memory"
        return Death("memory", reason, "smaller")
    where = "in a step" if marker is not None else "between steps"
    if -returncode in CRASHES:
        return Death("crash", f"{name} {where}, far from any memory limit", "none")
    return Death("crash", f"{name} {where}", "none")


def _killed(marker: Marker | None, oom_kills: int) -> Death:
    if oom_kills > 0:
        return Death("memory", "the kernel killed it for memory (oom_kill count grew)", "smaller")
    if marker is not None:
        reason = "SIGKILL in a step: the system may have killed it for memory"
        return Death("memory", reason, "smaller")
    return Death("killed", "SIGKILL between steps", "same")


def _near_limit(marker: Marker) -> bool:
    return marker.limit_bytes is not None and marker.needed_bytes >= NEAR * marker.limit_bytes


def next_smaller(plan: Plan, rows: int, width: int, tried: Collection[Plan] = ()) -> Plan | None:
    """The plan to try after `plan` failed on a micro-batch of this shape, None after the smallest.

    Half the rows, down to 1; then recompute every 2nd layer, then all; then attention in smaller
    blocks and the loss in smaller pieces. The effective batch stays what it is, and predictions go.

    Args:
        tried: Plans that failed already, without predictions.
    """
    plan = unpredicted(plan)
    return next((found for found in _smaller(plan, rows, width) if found not in tried), None)


def unpredicted(plan: Plan) -> Plan:
    """The plan without what was predicted for it."""
    return replace(plan, predicted_peak_gb=None, predicted_seconds=None)


def _smaller(plan: Plan, rows: int, width: int) -> Iterator[Plan]:
    if rows > 1:
        fewer = rows // 2
        tokens = min(plan.batch_tokens, fewer * width)
        yield replace(plan, batch_size=min(plan.batch_size, fewer), batch_tokens=tokens)
    if plan.recompute != 1:
        k = 1 if 0 < plan.recompute <= 2 else 2
        yield replace(plan, recompute=k, recompute_place="spread")
    for block in BLOCKS:
        if block < min(plan.attention_block or width, width):
            yield replace(plan, attention_block=block)
    chunk = plan.loss_chunk or 128
    if chunk > SMALLEST_CHUNK:
        smaller = chunk if not plan.loss_chunk else max(SMALLEST_CHUNK, chunk // 2)
        yield replace(plan, loss_chunk=smaller)


def event(death: Death, update: int, before: Plan, after: Plan | None) -> dict[str, Any]:
    """The recovery as run.json records it."""
    return {
        "update": update,
        "kind": death.kind,
        "reason": death.reason,
        "changed": changes(before, after) if after is not None else {},
    }


def changes(before: Plan, after: Plan) -> dict[str, list[Any]]:
    """Settings that differ between two plans, predictions aside: name → [before, after]."""
    old, new = unpredicted(before).record(), unpredicted(after).record()
    return {name: [old[name], new[name]] for name in new if old[name] != new[name]}
