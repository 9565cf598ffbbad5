"""A writer of small GGUF files for tests, by the format's description: header, metadata, tensors.

Blocks of 32 numbers: Q4_0 (half d, 16 bytes; d·(q − 8)), Q4_1 (half d, half m, 16 bytes; d·q + m),
Q8_0 (half d, 32 signed bytes; d·q). Of 16 bytes the low halves come first, then the high ones.
"""

import struct

import numpy as np

ALIGNMENT = 32
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}


def write(path, metadata, tensors):
    """`tensors`: name → (type, shape, bytes); shapes as NumPy has them (GGUF reverses them)."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        out += _string(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", TYPES[kind], offset)
        offset += len(data) + -len(data) % ALIGNMENT
    out += b"\0" * (-len(out) % ALIGNMENT)
    for _, _, data in tensors.values():
        out += data + b"\0" * (-len(data) % ALIGNMENT)
    path.write_bytes(out)


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def plain(array, kind="F32"):
    """A tensor of floats."""
    data = array.astype(np.float32 if kind == "F32" else np.float16).tobytes()
    return kind, array.shape, data


def quantized(kind, shape, random):
    """A random quantized tensor, and its numbers in float32 by the format's formula."""
    blocks = int(np.prod(shape)) // 32
    scale = random.uniform(0.01, 0.02, blocks).astype(np.float16)
    least = random.uniform(-0.2, 0.0, blocks).astype(np.float16)
    wide, low = scale.astype(np.float32)[:, None], least.astype(np.float32)[:, None]
    if kind == "Q8_0":
        steps = random.integers(-128, 128, (blocks, 32)).astype(np.int8)
        data = b"".join(scale[i].tobytes() + steps[i].tobytes() for i in range(blocks))
        return (kind, shape, data), (wide * steps).reshape(shape)
    steps = random.integers(0, 16, (blocks, 32)).astype(np.uint8)
    packed = steps[:, :16] | (steps[:, 16:] << 4)
    if kind == "Q4_0":
        data = b"".join(scale[i].tobytes() + packed[i].tobytes() for i in range(blocks))
        return (kind, shape, data), (wide * (steps.astype(np.float32) - 8)).reshape(shape)
    data = b"".join(
        scale[i].tobytes() + least[i].tobytes() + packed[i].tobytes() for i in range(blocks)
    )
    return (kind, shape, data), (wide * steps + low).reshape(shape)
