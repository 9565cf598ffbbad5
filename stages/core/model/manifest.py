"""The manifest of a base model: what it is, in facts that are the same on every machine.

`data/model.json` is the model stage's output; weights never enter the DVC cache, their hashes do.
This module imports no MLX, so stages that only need facts stay light.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stages.core import files
from stages.core.errors import UserError

MANIFEST = Path("data/model.json")


@dataclass(frozen=True)
class Source:
    """Where a model comes from, without a path of any machine.

    Attributes:
        kind: `builtin`, `wheel`, `hub`, `folder` or `gguf`.
        repo: `model.repo` as set, or None for a local folder or file.
        revision: Commit of a Hub repository, version of a wheel, or None.
        file: Name of the local folder or of the GGUF file, or None.
    """

    kind: str
    repo: str | None = None
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The facts other stages need.

    Attributes:
        name: Short name for people.
        source: Where it comes from.
        files: Name → `{"sha256", "bytes"}` of every source file that can change a result.
        model_type: Architecture, in mlx-lm's word.
        num_layers, hidden_size: Of the transformer stack.
        vocab_size: Tokens the tokenizer knows, added ones included.
        embedding_rows: Rows of the embedding; token ids must be below it.
        dtype: Effective type of weights that are not quantized: `float32`, `bfloat16`, `float16`.
        quantization: `{"bits", "group_size"}` of most quantized weights, or None.
        tied: The head is the embedding.
        max_positions: Longest sequence the model is made for, or None where its config is silent.
        parameters: Numbers in the model, packed ones counted singly.
        bytes: Memory of the loaded weights.
        layer_keys: Module paths inside a layer that LoRA can take.
        outer_keys: Module paths outside the layers that LoRA can take.
        eos_token_ids: Tokens that end a generation.
        has_chat_template, system_role: The tokenizer has a template; it takes a system turn.
    """

    name: str
    source: Source
    files: dict[str, dict[str, Any]]
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding_rows: int
    dtype: str
    quantization: dict[str, int] | None
    tied: bool
    max_positions: int | None
    parameters: int
    bytes: int
    layer_keys: list[str]
    outer_keys: list[str]
    eos_token_ids: list[int]
    has_chat_template: bool
    system_role: bool

    def record(self) -> dict[str, Any]:
        """The manifest as JSON-like values."""
        return asdict(self)

    def line(self) -> str:
        """One line for people: name, architecture, size, type."""
        packed = self.quantization
        kind = f"{packed['bits']} bit, {self.dtype}" if packed else self.dtype
        return (
            f"model {self.name}: {self.model_type}, {self.num_layers} layers of"
            f" {self.hidden_size}, {self.parameters / 1e6:.1f} million parameters, {kind},"
            f" {self.bytes / 1e9:.3g} GB"
        )


def read_manifest(path: Path = MANIFEST) -> Manifest:
    """Read what the model stage wrote.

    Raises:
        UserError: The file is missing or was written by another version.
    """
    record = files.read_json(path)
    try:
        return Manifest(**{**record, "source": Source(**record["source"])})
    except (KeyError, TypeError) as error:
        raise UserError(
            "The model's manifest is of another version",
            where=str(path),
            found=error,
            fix="run `dvc repro -f model`",
        ) from error
