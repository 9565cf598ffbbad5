"""The built-in model: bytes that repeat, one token per byte, mlx-lm loads it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

from stages.core import files
from stages.core.model import tiny
from stages.core.model.tokenizers import load_tokenizer, takes_system_turn

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny.write(path)
    return path


def test_another_process_writes_the_same_bytes(folder, tmp_path):
    code = "from pathlib import Path; from stages.core.model import tiny; tiny.write(Path('.'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert files.sha256_file(folder / name) == files.sha256_file(tmp_path / name)


def test_mlx_lm_loads_it_and_it_knows_nothing(folder):
    model, tokenizer = load(str(folder))
    assert len(model.layers) == 4
    assert {
        value.dtype for value in (model.model.norm.weight, model.layers[0].mlp.up_proj.weight)
    } == {mx.float32}
    tokens = tokenizer.encode("What a random model says of this sentence is worth nothing.")
    logits = np.array(model(mx.array([tokens]))[0], dtype=np.float64)
    rows = np.arange(len(tokens) - 1)
    chosen = logits[rows, tokens[1:]] - np.log(np.exp(logits[:-1]).sum(axis=1))
    assert -chosen.mean() == pytest.approx(math.log(260), abs=1.0)


def test_a_token_is_a_byte(folder):
    tokenizer = load_tokenizer(folder)
    text = "añ 日🙂\r\n\x00x"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer("<|im_end|>")["input_ids"] == [258]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (258, 259, 260)


def test_the_template_takes_a_system_turn_and_a_generation_prompt(folder):
    tokenizer = load_tokenizer(folder)
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert takes_system_turn(tokenizer)
