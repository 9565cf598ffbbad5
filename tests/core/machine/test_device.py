"""What is set before MLX is imported."""

import os
import subprocess
import sys

import pytest

CODE = """
import os
from stages.core.machine import device
device.prepare("cpu")
print(os.environ["MLX_USE_CUDA_GRAPHS"], os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"])
"""


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "0 4096"), ({"MLX_USE_CUDA_GRAPHS": "1"}, "1 4096")]
)
def test_cuda_graphs_are_off_unless_the_user_wants_them(given, expected):
    names = ("MLX_USE_CUDA_GRAPHS", "MLX_CUDA_GRAPH_CACHE_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
