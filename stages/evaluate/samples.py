"""What base and tuned model say to the same prompts, greedily, side by side.

Which rows are asked is fixed by a seed; nothing is drawn while generating, so a sample is a fact
about the model. The prompt is what training put before the answer, token by token; of text rows,
which have no prompt, the first half is continued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import generate_step

from stages.core.tables import Examples
from stages.core.update import batching
from stages.evaluate.losses import Pair
from stages.evaluate.records import Record, shortened
from stages.evaluate.scores import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEED = 0
LONGEST_TEXT_PROMPT = 64
"""Tokens of a text row that are given to be continued, at most half of it."""


@dataclass(frozen=True)
class Question:
    """A row to ask, with the tokens that go before the answer."""

    record: Record
    prompt: list[int]


@dataclass(frozen=True)
class Answer:
    """One model's answer.

    Attributes:
        text: Without the end token.
        tokens: How many were generated before the end token.
        ended: By an end token; else it was cut at `evaluate.max_new_tokens`.
    """

    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class Limits:
    """What ends a generation: one of the end tokens, or its length."""

    ends: frozenset[int]
    max_new_tokens: int


def choose(examples: Examples, count: int, leaked: set[int]) -> list[int]:
    """Examples to ask: whole rows, none that also stands in train, in an order fixed by a seed.

    Rows in several pieces do not fit the cap; they, then leaked rows, are taken only where nothing
    else is left.
    """
    pieces = np.bincount(examples.row, minlength=int(examples.row.max(initial=0)) + 1)
    rank = 2 * np.isin(examples.row, list(leaked)) + (pieces[examples.row] > 1)
    askable = (examples.targets > 0) & (examples.piece == 0) & (examples.lengths > 1)
    seeded = batching.order(len(examples), SEED, 0)
    ordered = seeded[np.argsort(rank[seeded], kind="stable")]
    return [int(i) for i in ordered if askable[i]][:count]


def prompt_length(tokens: np.ndarray, mask: np.ndarray, rendered: Sequence[int]) -> int:
    """How many tokens of an example go before its last answer.

    The last run of targets is the answer. Where every token but the first is a target (text, or
    `tokenize.train_on=all`) the rendered prompt says where the answer begins, as far as the
    example starts with it; where there is none, the text is cut.

    Args:
        tokens: int32 (T,), T at least 2.
        mask: bool (T,).
        rendered: The prompt by the chat template, or nothing.
    """
    outside = np.flatnonzero(~mask[: np.flatnonzero(mask)[-1]])
    if outside.size and outside[-1] > 0:
        return int(outside[-1]) + 1
    shared = 0
    while shared < min(len(rendered), len(tokens) - 1) and rendered[shared] == tokens[shared]:
        shared += 1
    return shared or max(1, min(len(tokens) // 2, LONGEST_TEXT_PROMPT))


def rendered_prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of the turns before the answer by the chat template; none where it refuses."""
    if not record.turns or not tokenizer.chat_template:
        return []
    try:
        text = tokenizer.apply_chat_template(
            record.turns, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template refuses with an exception of its own
        return []
    return tokenizer.encode(text, add_special_tokens=False)


def questions(
    examples: Examples,
    chosen: Sequence[int],
    records: dict[int, Record],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Question]:
    """Pair each chosen example with its record and its prompt."""
    found = []
    for i in chosen:
        tokens, mask = examples.example(i)
        record = records[int(examples.row[i])]
        rendered = rendered_prompt(record, tokenizer) if mask[1:].all() else []
        found.append(Question(record, tokens[: prompt_length(tokens, mask, rendered)].tolist()))
    return found


def greedy(model: nn.Module, prompt: Sequence[int], limits: Limits) -> tuple[list[int], bool]:
    """The likeliest continuation, token by token.

    Returns:
        The tokens without an end token, and whether one came before `limits.max_new_tokens`.
    """
    found: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=limits.max_new_tokens):
        if int(token) in limits.ends:
            return found, True
        found.append(int(token))
    return found, False


def ask(
    pair: Pair,
    asked: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    advance: Callable[[], None],
) -> list[dict[str, Any]]:
    """Both models' answers to every question, as entries of samples.json.

    `prompt` is the text the model saw, special tokens included; `turns` and `reference` are the
    row's own words, shortened where very long. Scores are there where the row has an answer.
    """

    def answer(prompt: Sequence[int]) -> Answer:
        tokens, ended = greedy(pair.model, prompt, limits)
        advance()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(text, len(tokens), ended)

    entries = []
    for question in asked:
        with pair.as_base():
            base = answer(question.prompt)
        entries.append(_entry(question, base, answer(question.prompt), tokenizer))
    return entries


def _entry(
    question: Question, base: Answer, tuned: Answer, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    record = question.record
    prompt = tokenizer.decode(question.prompt)
    entry = {
        **record.origin(),
        "prompt": shortened(prompt),
        "prompt_tokens": len(question.prompt),
        "turns": [{**turn, "content": shortened(turn["content"])} for turn in record.turns],
        "reference": shortened(_reference(record, prompt)),
        "base": asdict(base),
        "tuned": asdict(tuned),
    }
    if record.kind != "text":
        for name, answer in (("base", base), ("tuned", tuned)):
            entry[name]["score"] = asdict(score(answer.text, record.answer))
    return entry


def _reference(record: Record, prompt: str) -> str:
    """The answer in the data; of a text, what comes after the part that was given."""
    if record.kind != "text":
        return record.answer
    given = len(prompt) if record.answer.startswith(prompt) else 0
    return record.answer[given:]
