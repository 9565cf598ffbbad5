"""Tokens and targets are those of mlx-lm's own data sets, where these are right."""

import json

import pytest
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset

from stages.core.config.schema import Tokenize
from stages.tokenize.encode import assemble, encode_texts
from stages.tokenize.rows import Renderer
from stages.tokenize.template import load_template
from stages.tokenize.vocabulary import read_vocabulary
from tests.tokenize import smollm2

TEXTS = ["Say 12 things.", "  two  spaces\n\n", "né 日本 👩‍👩‍👧", "\n\nafter lines", "x"]
PAIRS = [(left, right) for left in TEXTS for right in TEXTS]


def ours(kind, record, **settings):
    tokenizer = smollm2.tokenizer()
    template = load_template(tokenizer)
    vocabulary = read_vocabulary(tokenizer, [2], template.answer_footer)
    row = Renderer(template, Tokenize(**settings)).render(kind, json.dumps(record))
    found = assemble(vocabulary, [row], encode_texts(vocabulary, [row.text]), "auto")
    return found.tokens.tolist(), found.mask.tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    theirs, _ = TextDataset([], smollm2.tokenizer()).process({"text": text})
    tokens, mask = ours("text", {"text": text})
    assert tokens == theirs
    assert mask == [False] + [True] * (len(tokens) - 1)


@pytest.mark.parametrize(("prompt", "completion"), PAIRS)
def test_completions(prompt, completion):
    row = {"prompt": prompt, "completion": completion}
    data = CompletionsDataset([], smollm2.tokenizer(), "prompt", "completion", mask_prompt=True)
    theirs, offset = data.process(row)
    tokens, mask = ours("completion", row)
    assert tokens == theirs
    # A line break that begins the answer may be one token with the header's: then it belongs to
    # the header here, and mlx-lm's offset, counted on the prompt alone, says the same.
    assert mask == [False] * offset + [True] * (len(tokens) - offset)


@pytest.mark.parametrize(("question", "answer"), PAIRS[::3])
def test_last_answers_of_chats(question, answer):
    roles = ["system", "user", "assistant", "user", "assistant"]
    words = ["Be brief.", answer, question, question, answer]
    record = {"messages": [{"role": r, "content": w} for r, w in zip(roles, words, strict=True)]}
    theirs, offset = ChatDataset([], smollm2.tokenizer(), mask_prompt=True).process(record)
    tokens, mask = ours("chat", record, train_on="last_assistant")
    assert tokens == theirs
    assert mask == [False] * offset + [True] * (len(tokens) - offset)
