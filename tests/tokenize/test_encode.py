"""Borders in token space: exact for every kind of tokenizer."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.core.config.schema import Tokenize
from stages.tokenize.encode import assemble, encode_texts
from stages.tokenize.rows import Rendered, Renderer
from stages.tokenize.template import load_template
from stages.tokenize.vocabulary import read_vocabulary
from tests.tokenize import chats
from tests.tokenize.chats import turn

CORPUS = [
    "the cat sat on the mat\n\n",
    "  two  spaces\n\nand lines",
    "né café 日本 👩‍👩‍👧",
    "a b c",
] * 8


def byte_level(normalizer=None):
    """Byte-level BPE with merges across spaces and line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=chats.SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def sentence_piece():
    """Spaces as ▁, unknown characters as bytes: no byte-level spelling."""
    words = {"<unk>": 0}
    for byte in range(256):
        words[f"<0x{byte:02X}>"] = len(words)
    for letter in "▁abcdefghijklmnopqrstuvwxyz\n":
        words[letter] = len(words)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c")]
    for left, right in merges:
        words[left + right] = len(words)
    tokenizer = Tokenizer(models.BPE(words, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in chats.SPECIAL])
    return tokenizer


def wrapped(backend, template=None):
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    made.chat_template = template
    return made


def targets_of(backend, text, spans, turns=(), system_end=0):
    vocabulary = read_vocabulary(wrapped(backend), [])
    row = Rendered(text, spans, list(turns), system_end, True, [])
    return assemble(vocabulary, [row], encode_texts(vocabulary, [text]), "auto")


def expected_start(backend, text, border):
    """First token that starts at `border` or later, by lengths of decoded prefixes of ids."""
    ids = backend.encode(text, add_special_tokens=False).ids
    size = len(text[:border].encode())
    done = 0
    for i, id_ in enumerate(ids):
        if done >= size:
            return i
        word = backend.id_to_token(id_)
        special = id_ in backend.get_added_tokens_decoder()
        done += len(word.encode()) if special else len(word)
    return len(ids)


@settings(max_examples=150, deadline=None)
@given(text=st.text(min_size=1, max_size=40) | st.sampled_from(CORPUS), data=st.data())
def test_byte_level_borders(text, data):
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
    found = targets_of(BYTE_LEVEL, text, [((at[0], True), (at[1], True))], [at[1]], at[0])
    first, last = (expected_start(BYTE_LEVEL, text, border) for border in at)
    expected = [i > 0 and first <= i < last for i in range(len(found.tokens))]
    assert found.mask.tolist() == expected
    assert found.turns.tolist() == [last]
    assert found.system_end.tolist() == ([first] if at[0] else [0])


BYTE_LEVEL = byte_level()
PIECES = sentence_piece()


def test_a_token_over_a_border():
    """Two line breaks are one token here. Cut in the middle it belongs to the text before a whole
    border, and to the text after one where the texts part."""
    text = "ab\n\n"
    words = [BYTE_LEVEL.id_to_token(i) for i in BYTE_LEVEL.encode(text).ids]
    assert "ĊĊ" in words
    over = words.index("ĊĊ")
    end = (len(text), True)
    for whole, first in ((True, over + 1), (False, over)):
        found = targets_of(BYTE_LEVEL, text, [((3, whole), end)])
        assert np.flatnonzero(found.mask).tolist() == list(range(first, len(words)))


def test_a_normalizer_changes_the_text():
    """NFC makes one letter of two characters; the borders stay where they are."""
    from tokenizers import normalizers

    backend = byte_level(normalizers.NFC())
    decomposed = "e\u0301" * 3 + "|" + "e\u0301" * 2
    found = targets_of(backend, decomposed, [((7, True), (11, True))])
    assert backend.decode(found.tokens[found.mask].tolist()) == "é" * 2


@pytest.mark.parametrize("answer", ["the cat", " the cat", "日本 né", "\n\nb", "x"])
def test_tokenizers_without_bytes_go_by_offsets(answer):
    template = chats.CHATML
    tokenizer = wrapped(PIECES, template)
    renderer = Renderer(load_template(tokenizer), Tokenize())
    vocabulary = read_vocabulary(tokenizer, [])
    assert vocabulary.bytes_of is None
    record = {"messages": [turn("user", "a 日"), turn("assistant", answer), turn("user", "b")]}
    row = renderer.render("chat", json.dumps(record))
    found = assemble(vocabulary, [row], encode_texts(vocabulary, [row.text]), "auto")
    text = PIECES.decode(found.tokens[found.mask].tolist(), skip_special_tokens=False)
    assert text.removeprefix(" ") == f"{answer}<|end|>\n".removeprefix(" ")


def test_many_rows_equal_one_by_one():
    tokenizer = chats.tokenizer(chats.CHATML)
    renderer = Renderer(load_template(tokenizer), Tokenize())
    vocabulary = read_vocabulary(tokenizer, [])
    records = [
        {"messages": [turn("user", "q" * i), turn("assistant", "é" * i), turn("user", "日")]}
        for i in range(6)
    ]
    rows = [renderer.render("chat", json.dumps(record)) for record in records]
    rows.insert(3, renderer.render("text", json.dumps({"text": "plain"})))
    together = assemble(vocabulary, rows, encode_texts(vocabulary, [r.text for r in rows]), "auto")
    masks = np.split(together.mask, together.offsets[1:-1])
    turns = np.split(together.turns, together.turn_offsets[1:-1])
    for row, mask, turn_at, end in zip(rows, masks, turns, together.end, strict=True):
        alone = assemble(vocabulary, [row], encode_texts(vocabulary, [row.text]), "auto")
        assert alone.mask.tolist() == mask.tolist()
        assert alone.turns.tolist() == turn_at.tolist()
        assert alone.end.tolist() == [end]


def test_one_start_token_only():
    """A tokenizer that puts a BOS before texts; a text that has it gets no second one."""
    parts = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    parts["single"] = [start, {"Sequence": {"id": "A", "type_id": 0}}]
    parts["pair"] = [*parts["single"], {"Sequence": {"id": "B", "type_id": 0}}]
    parts["special_tokens"] = {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}}
    tokenizer = chats.tokenizer(chats.STRICT, post_processor=parts)
    vocabulary = read_vocabulary(tokenizer, [])
    assert vocabulary.start == [259]
    renderer = Renderer(load_template(tokenizer), Tokenize())
    for kind, record, expected in (
        ("text", {"text": "ab"}, "<s>ab<|end|>"),
        ("text", {"text": "<s>ab"}, "<s>ab<|end|>"),
        ("completion", {"prompt": "a", "completion": "b"}, "<s>[Q]a[/Q]b<|end|>"),
    ):
        row = renderer.render(kind, json.dumps(record))
        found = assemble(vocabulary, [row], encode_texts(vocabulary, [row.text]), "auto")
        assert vocabulary.backend.decode(found.tokens.tolist(), False) == expected
        assert not found.mask[0]


def test_end_token_index():
    tokenizer = chats.tokenizer(chats.CHATML)
    renderer = Renderer(load_template(tokenizer), Tokenize())
    vocabulary = read_vocabulary(tokenizer, [])
    closed = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    asked = {"messages": [*closed["messages"], turn("user", "c")]}
    rows = [renderer.render("chat", json.dumps(record)) for record in (closed, asked)]
    found = assemble(vocabulary, rows, encode_texts(vocabulary, [r.text for r in rows]), "auto")
    # <|end|> stands before the last line break, and is no target after a question.
    assert found.end.tolist() == [found.offsets[1] - 2, -1]


def test_truncation_in_the_tokenizer_file_is_ignored():
    tokenizer = chats.tokenizer(chats.CHATML)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    vocabulary = read_vocabulary(tokenizer, [])
    assert [len(e) for e in encode_texts(vocabulary, ["abcdefgh"])] == [8]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text):
    """D10: emoji with joiners, right-to-left, control characters: decoded byte for byte."""
    vocabulary = read_vocabulary(chats.tokenizer(), [])
    row = Renderer(None, Tokenize()).render("text", json.dumps({"text": text}))
    found = assemble(vocabulary, [row], encode_texts(vocabulary, [row.text]), "never")
    assert vocabulary.backend.decode(found.tokens.tolist(), False) == text
