"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json.

Byte-level BPE only ("gpt2" in GGUF): tokens and merges are in the file, how text is cut before
merging is named by `tokenizer.ggml.pre`. The cuts below are the published ones of each family
(llama.cpp's `llm_tokenizer_bpe` lists the same).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from stages.core import files
from stages.core.errors import UserError

CONTROL, USER_DEFINED = 3, 4
"""Token types of GGUF that are never produced by merging: marks, and words added by hand."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
FIX = "use the model's Hugging Face or MLX folder instead (model.path, or model.repo)"


def write(folder: Path, metadata: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

    Raises:
        UserError: The file holds no tokenizer, or one of another kind.
    """
    tokenizer = build(metadata)
    files.write_text(folder / "tokenizer.json", tokenizer.to_str())
    files.write_json(folder / "tokenizer_config.json", config(metadata))


def build(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        UserError: The file holds no tokenizer, or one of another kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    cut = metadata.get("tokenizer.ggml.pre", "")
    splitter = _splitters().get(cut)
    if kind != "gpt2" or splitter is None:
        raise UserError(
            "The GGUF file's tokenizer cannot be rebuilt",
            where="tokenizer.ggml.model, tokenizer.ggml.pre",
            found=f"{kind}, {cut or 'not named'}",
            expected="gpt2 with " + ", ".join(_splitters()),
            fix=FIX,
        )
    words = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe")
    )
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    _add_marks(tokenizer, words, metadata.get("tokenizer.ggml.token_type", []))
    if metadata.get("tokenizer.ggml.add_bos_token"):
        number = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{words[number]} $A",
            pair=f"{words[number]} $A {words[number]} $B",
            special_tokens=[(words[number], number)],
        )
    return tokenizer


def _splitters() -> dict[str, Any]:
    """How text is cut into words, by GGUF's name for it."""

    def by_pattern(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([digits, words]),
        "llama-bpe": by_pattern(LLAMA3),
        "qwen2": by_pattern(QWEN2),
    }


def _add_marks(tokenizer: Tokenizer, words: list[str], types: list[int]) -> None:
    """Tokens that stand in the text as they are: control marks are special, added words are not."""
    for number, kind in enumerate(types):
        if kind in (CONTROL, USER_DEFINED):
            mark = AddedToken(words[number], normalized=False, special=kind == CONTROL)
            tokenizer.add_special_tokens([mark]) if kind == CONTROL else tokenizer.add_tokens(
                [mark]
            )


def config(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: which tokens begin, end and pad, and the chat template."""
    words = metadata["tokenizer.ggml.tokens"]
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    marks = {
        f"{name}_token": words[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["context_length"],
        **marks,
        **({"chat_template": template} if template else {}),
    }
