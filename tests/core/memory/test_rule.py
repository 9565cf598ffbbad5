"""A plan by rule honours what is fixed and cuts the rest small."""

from types import SimpleNamespace

import numpy as np
import pytest

from stages.core.config.schema import Settings
from stages.core.memory import rule

MANIFEST = SimpleNamespace(vocab_size=49152, num_layers=30, hidden_size=576, dtype="float32")
LENGTHS = np.array([10, 20, 33, 47, 100, 250, 384, 384, 5, 64])


def settings(effective=8, hosts=None, **memory):
    made = Settings()
    made.train.effective_batch_size, made.train.epochs = effective, 1.0
    made.run.launch.hosts = hosts
    for key, value in memory.items():
        setattr(made.memory, key, value)
    return made


def plan(**given):
    return rule.by_rule(settings(**given), MANIFEST, LENGTHS, "cpu")


def test_all_auto_on_the_cpu():
    made = plan()
    assert (made.batch_size, made.batch_tokens, made.recompute) == (8, 2048, 0)
    assert made.loss_chunk == 128  # 128 × 49152 × 4 bytes = 25 MB of logits
    assert made.attention_block == 64
    assert made.widths[-1] == 384
    assert len(made.widths) <= 8


def test_large_vocabulary_has_smaller_pieces():
    assert rule.loss_chunk(256_000, "metal") == 64
    assert rule.loss_chunk(256_000, "cuda") == 512


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"batch_size": 3}, 3),
        ({"batch_size": 30}, 8),
        ({"grad_accumulation_steps": 3}, 3),
        ({"grad_accumulation_steps": 8}, 1),
        ({"grad_accumulation_steps": 2, "hosts": 2}, 2),
        ({"grad_accumulation_steps": 2, "hosts": ["a", "b", "c"]}, 2),
    ],
)
def test_fixed_rows_or_steps_decide_the_micro_batch(given, rows):
    made = plan(**given)
    assert made.batch_size == rows
    assert made.batch_tokens >= rows * LENGTHS.max()


def test_other_fixed_values_stand_in_the_plan():
    made = plan(
        grad_checkpoint=2,
        loss_chunk="off",
        attention_block=256,
        activation_cache="on",
        cache_limit_gb=0,
    )
    assert (made.recompute, made.loss_chunk, made.attention_block) == (2, 0, 256)
    assert made.activation_cache
    assert made.cache_limit_gb == 0.0


@pytest.mark.parametrize(("value", "k"), [(True, 1), (False, 0), (4, 4)])
def test_recompute_words(value, k):
    assert plan(grad_checkpoint=value).recompute == k
