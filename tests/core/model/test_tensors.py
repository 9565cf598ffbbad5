"""The safetensors writer, read back by MLX and by the format's own package."""

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

from stages.core.model import tensors


def arrays():
    return {
        "b.weight": mx.arange(6, dtype=mx.float32).reshape(2, 3),
        "a.flag": mx.array([True, False, True]),
        "a.packed": mx.array([[1, 2**32 - 1]], dtype=mx.uint32),
        "scalar": mx.array(1.5, dtype=mx.float16),
        "columns": mx.arange(6).reshape(2, 3).T,
    }


def test_both_readers_give_the_arrays_back(tmp_path):
    tensors.write(tmp_path / "x.safetensors", arrays())
    ours = mx.load(str(tmp_path / "x.safetensors"))
    theirs = load_file(tmp_path / "x.safetensors")
    assert set(ours) == set(theirs) == set(arrays())
    for name, array in arrays().items():
        assert ours[name].dtype == array.dtype
        assert mx.array_equal(ours[name], array)
        assert np.array_equal(theirs[name], np.array(array))


def test_bfloat16_keeps_its_bits(tmp_path):
    values = mx.array([1.0, -3.140625, 1e30]).astype(mx.bfloat16)
    tensors.write(tmp_path / "x.safetensors", {"x": values})
    read = mx.load(str(tmp_path / "x.safetensors"))["x"]
    assert read.dtype == mx.bfloat16
    assert mx.array_equal(read, values)


def test_bytes_do_not_depend_on_the_order_of_insertion(tmp_path):
    tensors.write(tmp_path / "x", arrays())
    tensors.write(tmp_path / "y", dict(reversed(arrays().items())))
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_written_arrays_are_taken_out(tmp_path):
    mapping = arrays()
    tensors.write(tmp_path / "x", mapping)
    assert mapping == {}
