"""The plan: how one update is cut to fit this machine. It never changes the mathematics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

START_TOKENS = 128


@dataclass(frozen=True)
class Plan:
    """Memory settings chosen for this machine and run.

    Attributes:
        batch_size: Most examples in one micro-batch.
        batch_tokens: Most padded tokens (rows × width) in one micro-batch; a single longer example
            makes a micro-batch of its own.
        start_tokens: What starting a micro-batch costs, in padded tokens: below it, joining rows
            beats padding.
        widths: At most 8 padded lengths that micro-batches of this run may have, ascending.
        recompute: 0 keeps all activations; k recomputes every k-th trained layer; 1 all of them.
        recompute_place: `spread` (every k-th), `first` or `last` half of the trained layers.
        loss_chunk: Targets per piece of the loss; 0: one piece.
        attention_block: Queries per attention block; 0: off.
        activation_cache: Read the frozen layers' output from disk.
        compiled: Use mx.compile for the micro-step.
        cache_limit_gb: Memory the allocator may keep, or None for MLX's own limit.
        memory_limit_gb: During a step MLX waits for operations under way before it takes more than
            this; None: it runs ahead. A step that needs more than that still gets it.
        check_tokens: About how long the example is that the plan is checked on before update 1.
        predicted_peak_gb, predicted_seconds: Per update; None where nothing was measured.
    """

    batch_size: int
    batch_tokens: int
    widths: tuple[int, ...]
    recompute: int = 0
    recompute_place: str = "spread"
    loss_chunk: int = 128
    attention_block: int = 0
    activation_cache: bool = False
    compiled: bool = False
    cache_limit_gb: float | None = None
    memory_limit_gb: float | None = None
    start_tokens: int = START_TOKENS
    check_tokens: int = 128
    predicted_peak_gb: float | None = None
    predicted_seconds: float | None = None

    def record(self) -> dict[str, Any]:
        """The plan as JSON-like values."""
        return asdict(self)


def from_record(record: dict[str, Any]) -> Plan:
    """The plan stored in a checkpoint or report.

    Raises:
        TypeError: It was written by another version.
    """
    return Plan(**{**record, "widths": tuple(record["widths"])})
