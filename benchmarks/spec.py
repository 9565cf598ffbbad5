"""What one child process measures, as JSON on its command line. No MLX."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

OURS, THEIRS = "ours", "mlx-lm"


@dataclass(frozen=True)
class Spec:
    """One run of one way of training.

    Attributes:
        side: `ours` or `mlx-lm`.
        examples: Parquet file of the examples, relative to the workspace.
        cap: No example is longer; mlx-lm's `max_seq_length`.
        layers: `train.num_layers`, -1 for all.
        rows: Rows per micro-batch, mlx-lm's `batch_size`.
        effective: Examples per update.
        passes: Over the examples; the first one has what happens once in it.
        fine_tune_type: `lora`, `dora` or `full`.
        shape: A model of random weights (benchmarks.shapes), None for the workspace's own.
        dtype: Of a random model.
        bits: Of a random model's quantized weights, None for none.
        rank: Of LoRA.
        learning_rate: 0 where passes are compared.
        grad_checkpoint: mlx-lm's flag.
        planned: Ours under the plan that the planner chooses.
        plan: Ours: fields of a Plan that differ from equal rows and nothing else.
        kind: `run.device`.
        tuned: mlx-lm's side too runs MLX with what `stages` sets for it on CUDA.
        environment: Of the child process.
    """

    side: str
    examples: str
    cap: int
    layers: int = 8
    rows: int = 4
    effective: int = 8
    passes: int = 2
    fine_tune_type: str = "lora"
    shape: str | None = None
    dtype: str = "bfloat16"
    bits: int | None = None
    rank: int = 8
    learning_rate: float = 0.0
    grad_checkpoint: bool = False
    planned: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    kind: str = "auto"
    tuned: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """As one word of a command line."""
        return json.dumps(asdict(self), sort_keys=True)


def from_text(text: str) -> Spec:
    """What `Spec.text` gave."""
    return Spec(**json.loads(text))
