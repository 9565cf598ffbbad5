"""Facts about a tokenizer's ids, as arrays that are looked up by id."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLANK_PIECES = frozenset("\t\n\r ") | frozenset("ĠĊĉč▁")
"""Characters of a blank token: as they are, in byte-level spelling, as SentencePiece's space."""
BLANK_BYTES = frozenset({"<0x09>", "<0x0A>", "<0x0D>", "<0x20>"})


@dataclass(frozen=True)
class Vocabulary:
    """What is known about each of the V ids.

    Attributes:
        backend: The `tokenizers` object, without truncation and padding.
        start: Ids the tokenizer itself puts before every text (a BOS), usually none or one.
        end: The end-of-text id, None where the tokenizer names none.
        bytes_of: int32 (V,): UTF-8 bytes each id stands for; None unless byte-level.
        blank: bool (V,): ids of nothing but white space.
        ends: bool (V,): ids that end a turn or a text.
        control: bool (V,): special tokens, which no text should hold.
        control_words: Their spellings.
    """

    backend: Tokenizer
    start: list[int]
    end: int | None
    bytes_of: np.ndarray | None
    blank: np.ndarray
    ends: np.ndarray
    control: np.ndarray
    control_words: list[str]


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], footer: str = ""
) -> Vocabulary:
    """Look a tokenizer over.

    Args:
        tokenizer: A fast transformers tokenizer.
        end_ids: The model's own end ids (`eos_token_ids` of its manifest).
        footer: What the chat template puts after an answer; its special tokens end a turn too.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    added = backend.get_added_tokens_decoder()
    special = {id_: token.content for id_, token in added.items() if token.special}
    end = tokenizer.eos_token_id
    if end is None and end_ids:
        end = end_ids[0]
    ends = {*end_ids, *([] if end is None else [end])}
    ends |= {id_ for id_, word in special.items() if word in footer}
    spelling = backend.get_vocab(with_added_tokens=True)
    size = max([*spelling.values(), *added, *ends], default=0) + 1
    return Vocabulary(
        backend=backend,
        start=_start(backend),
        end=end,
        bytes_of=_bytes_of(backend, spelling, size),
        blank=_flags((id_ for word, id_ in spelling.items() if _is_blank(word)), size),
        ends=_flags(ends, size),
        control=_flags(special, size),
        control_words=sorted(special.values()),
    )


def _flags(ids: Iterable[int], size: int) -> np.ndarray:
    flags = np.zeros(size, bool)
    flags[list(ids)] = True
    return flags


def _is_blank(word: str) -> bool:
    return word in BLANK_BYTES or (bool(word) and BLANK_PIECES.issuperset(word))


def _start(backend: Tokenizer) -> list[int]:
    """What the tokenizer's own post-processing puts before a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at]
    return []


def _bytes_of(backend: Tokenizer, spelling: dict[str, int], size: int) -> np.ndarray | None:
    """Bytes per id: in byte-level spelling a character stands for a byte, in added tokens not."""
    for part in (backend.pre_tokenizer, backend.decoder):
        if part is None or not _has(json.loads(part.__getstate__()), "ByteLevel"):
            return None
    lengths = np.zeros(size, np.int32)
    for word, id_ in spelling.items():
        lengths[id_] = len(word)
    for id_, token in backend.get_added_tokens_decoder().items():
        lengths[id_] = len(token.content.encode())
    return lengths


def _has(part: object, kind: str) -> bool:
    """Whether a part of tokenizer.json is, or holds, a component of one kind."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_has(value, kind) for value in part.values())
    return isinstance(part, list) and any(_has(value, kind) for value in part)
