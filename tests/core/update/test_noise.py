"""Noise hangs on every number and on their order, and on nothing else."""

import mlx.core as mx

from stages.core.update import noise


def drawn(*numbers):
    noise.seed(*numbers)
    return mx.random.uniform(shape=(3,)).tolist()


def test_the_same_numbers_give_the_same_noise_whatever_was_drawn_before():
    first = drawn(0, 7, 2)
    mx.random.uniform(shape=(11,))
    assert drawn(0, 7, 2) == first


def test_seed_update_and_micro_batch_each_change_it():
    draws = [drawn(*x) for x in [(0, 7, 2), (1, 7, 2), (0, 8, 2), (0, 7, 3), (0, 2, 7), (7, 0, 2)]]
    assert len({tuple(x) for x in draws}) == len(draws)
