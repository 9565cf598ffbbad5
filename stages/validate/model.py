"""Checks of the model against what is to be trained of it."""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.config.schema import Settings
from stages.core.config.settings import nearest
from stages.core.errors import listed
from stages.validate.check import ERROR, WARNING, Check
from stages.validate.facts import Facts


def checks(facts: Facts, settings: Settings) -> Iterator[Check]:
    """All checks of the model."""
    yield num_layers(facts, settings)
    yield lora_keys(facts, settings)
    yield full_on_quantized(facts, settings)
    yield token_ids(facts)
    yield vocabulary(facts)
    yield positions(facts)


def num_layers(facts: Facts, settings: Settings) -> Check:
    """Not more layers than there are; -1 means all of them."""
    asked, have = settings.train.num_layers, facts.manifest.num_layers
    if asked <= have:
        trained = have if asked == -1 else asked
        return Check("num_layers", found=f"{trained} of {have} layers")
    return Check(
        "num_layers",
        ERROR,
        "train.num_layers is more than the model has",
        found=asked,
        expected=f"1 to {have}, or -1 for all",
        fix=f"set train.num_layers={have} or less",
    )


def lora_keys(facts: Facts, settings: Settings) -> Check:
    """Every key names a module that can be adapted."""
    keys = settings.train.lora_parameters.keys
    if settings.train.fine_tune_type == "full" or keys is None:
        return Check("lora_keys")
    known = [*facts.manifest.layer_keys, *facts.manifest.outer_keys]
    unknown = [key for key in keys if key not in known]
    if keys and not unknown:
        return Check("lora_keys", found=listed(keys))
    close = [nearest(key, known) for key in unknown]
    named = ", ".join(f"{a} → {b}" for a, b in zip(unknown, close, strict=True) if b)
    return Check(
        "lora_keys",
        ERROR,
        "train.lora_parameters.keys names no module of the model"
        if unknown
        else "train.lora_parameters.keys is empty: nothing is trained",
        found=listed(unknown),
        expected=f"of {listed(known, most=30)}",
        fix=f"nearest: {named}" if named else "choose keys from the list, or null for all",
    )


def full_on_quantized(facts: Facts, settings: Settings) -> Check:
    """Quantized weights are whole numbers: no gradient goes there."""
    packed = facts.manifest.quantization
    if settings.train.fine_tune_type != "full" or packed is None:
        return Check("full_on_quantized")
    return Check(
        "full_on_quantized",
        ERROR,
        "full fine-tuning needs weights that are not quantized",
        found=f"fine_tune_type=full on a {packed['bits']}-bit model",
        expected="lora or dora, or an unquantized model",
        fix="set train.fine_tune_type=lora, or choose the model's unquantized version",
    )


def token_ids(facts: Facts) -> Check:
    """Every token of every example has a row in the embedding."""
    rows = facts.manifest.embedding_rows
    largest = max(counts.largest_id for counts in facts.counts.values())
    least = min(counts.least_id for counts in facts.counts.values())
    if largest < rows and least >= 0:
        return Check("token_ids", expected=f"below {rows}")
    return Check(
        "token_ids",
        ERROR,
        "a token id has no row in the model's embedding",
        found=largest if largest >= rows else least,
        expected=f"0 to {rows - 1}",
        fix="the tokenizer is not this model's: use the files that came with the weights",
    )


def vocabulary(facts: Facts) -> Check:
    """A tokenizer with more tokens than the embedding has rows is some other model's."""
    known, rows = facts.manifest.vocab_size, facts.manifest.embedding_rows
    if known <= rows:
        return Check("vocabulary", found=known, expected=f"at most {rows}")
    return Check(
        "vocabulary",
        WARNING,
        "the tokenizer knows more tokens than the embedding has rows; no example uses these",
        found=known,
        expected=f"at most {rows}",
        fix="check that tokenizer and weights belong together",
    )


def positions(facts: Facts) -> Check:
    """Examples longer than what the model was made for."""
    most = facts.manifest.max_positions
    longest = max(counts.longest for counts in facts.counts.values())
    if most is None or longest <= most:
        return Check("positions")
    return Check(
        "positions",
        WARNING,
        "examples are longer than the model was made for",
        found=f"{longest} tokens",
        expected=f"at most {most}",
        fix=f"set split.max_seq_length={most} or less",
    )
