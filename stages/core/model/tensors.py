"""Write safetensors files with the same bytes on every machine, one array in memory at a time.

`mx.save_safetensors` lays arrays out in the order of a C++ hash table, which is another one on
macOS, and reports a full disk as a RuntimeError. This writer sorts, and a full disk is an OSError.
Format: github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}
ALIGNMENT = 8


def write(path: Path, arrays: dict[str, mx.array]) -> None:
    """Write arrays to a safetensors file, wide types first, then by name.

    Lazy arrays are computed one after the other, and each is taken out of `arrays` before the next,
    so that a caller who holds no other reference never has them all in memory.

    Raises:
        OSError: The file cannot be written (a full disk among others).
        KeyError: An array has a type the format has no word for.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.size, name))
    with open(path, "wb") as file:
        header = _header(names, arrays)
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in names:
            file.write(_raw(arrays.pop(name)))


def _header(names: list[str], arrays: dict[str, mx.array]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    start = 0
    for name in names:
        array = arrays[name]
        end = start + array.nbytes
        table[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _raw(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:  # NumPy has no such type: the same bits under another name
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.array(array, copy=False)).tobytes()
