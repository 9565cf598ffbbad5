"""What is set before MLX is imported."""

import os
import subprocess
import sys

import pytest

CODE = """
import os
from stages.core.machine import device
device.prepare("cpu")
print(os.environ["MLX_USE_CUDA_GRAPHS"], os.environ["MLX_MAX_OPS_PER_BUFFER"])
"""
NAMES = ("MLX_USE_CUDA_GRAPHS", "MLX_MAX_OPS_PER_BUFFER")


@pytest.mark.skipif(sys.platform != "linux", reason="set where CUDA can be")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "0 10"),
        ({"MLX_USE_CUDA_GRAPHS": "1"}, "1 10"),
        ({"MLX_MAX_OPS_PER_BUFFER": "50"}, "0 50"),
    ],
)
def test_what_mlx_reads_on_cuda_is_set_unless_the_user_did(given, expected):
    environment = {key: value for key, value in os.environ.items() if key not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
