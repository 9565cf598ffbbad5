"""Names and identities of points, worked out by hand."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from stages.commands.sweeping.points import Sweep, point, short
from stages.core.config.schema import Settings


def made(*overrides, swept=(), prefix=""):
    sweep = Sweep("s", Path("/p"), Path("/p/.cache/sweeps/s/f"), tuple(swept), prefix=prefix)
    composed = OmegaConf.merge(
        OmegaConf.structured(Settings), OmegaConf.from_dotlist(list(overrides))
    )
    return point(composed, overrides, sweep)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("0.0003", "3e-4"),
        ("3e-05", "3e-5"),
        ("0.00025", "2_5e-4"),
        ("0.05", "0_05"),
        ("1", "1"),
        ("16", "16"),
    ],
)
def test_a_rate_reads_as_people_write_it(value, word):
    found = made(f"train.learning_rate={value}", swept=["train.learning_rate"])
    assert found.name == f"learning_rate-{word}"


def test_a_sampler_s_long_number_is_cut_and_stays_its_own():
    names = {made(f"train.learning_rate=0.00012345678901{n}").name for n in (1, 2)}
    assert len(names) == 2
    assert all(re.fullmatch(r"learning_rate-1_23e-4-[0-9a-f]{4}", name) for name in names)


def test_minus_one_and_null_stay_readable():
    assert made("train.num_layers=-1").name == "num_layers-m1"
    assert made("train.patience=null").name == "patience-null"


def test_values_that_lose_characters_keep_apart():
    keys = "train.lora_parameters.keys"
    names = {made(f"{keys}=[{name}]").name for name in ("self_attn.q_proj", "self_attn.q+proj")}
    assert len(names) == 2
    assert all(name.startswith("keys-self_attn_q_proj-") for name in names)


def test_only_swept_keys_make_the_name_and_the_label():
    words = ("train.learning_rate=0.01", "train.lora_parameters.rank=4", "train.updates=9")
    found = made(*words, swept=["train.learning_rate", "train.lora_parameters.rank"])
    assert found.name == "learning_rate-1e-2-rank-4"
    assert found.label == "learning_rate=0.01 rank=4"
    assert found.values == {
        "train.learning_rate": 0.01,
        "train.lora_parameters.rank": 4,
        "train.updates": 9,
    }


def test_a_sweep_that_was_named_names_its_experiments():
    assert made("train.seed=1", prefix="seeds").name == "seeds-seed-1"


def test_keys_that_end_alike_are_told_apart():
    keys = ["train.seed", "data.seed", "train.updates"]
    assert short(keys) == ["train_seed", "data_seed", "updates"]


def test_identity_is_the_mathematics_alone():
    plain = made("train.seed=1")
    machine = made("train.seed=1", "memory.batch_size=2", "run.keep_last=3")
    assert plain.mathematics == machine.mathematics
    assert plain.mathematics["train.seed"] == 1
    assert not any(key.startswith(("memory", "run")) for key in plain.mathematics)
    assert plain.key != machine.key
