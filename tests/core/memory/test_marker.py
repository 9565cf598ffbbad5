"""The note of a step outlives a killed process, and swap warnings come once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.core.memory import recovery
from stages.core.memory.marker import StepMarker, left_behind
from stages.core.memory.pressure import Pressure

REPOSITORY = Path(__file__).parents[3]


def test_a_step_that_ends_leaves_nothing(tmp_path):
    marker = StepMarker(tmp_path / "step")
    with marker.around(3, 4, 64):
        assert marker.path.exists()
    assert left_behind(marker.path) is None
    with pytest.raises(RuntimeError, match="stop"), marker.around(3, 4, 64):
        raise RuntimeError("stop")
    assert left_behind(marker.path) is None


def test_a_killed_step_is_told_by_its_note(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stages.core.memory.marker import StepMarker\n"
        "with StepMarker(Path(sys.argv[1])).around(7, 4, 64, step_bytes=1_500_000_000):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "step")], check=False, cwd=REPOSITORY
    )
    note = left_behind(tmp_path / "step")
    assert (note.update, note.rows, note.width) == (7, 4, 64)
    assert note.needed_bytes > 1_500_000_000
    assert note.limit_bytes > 0
    assert left_behind(tmp_path / "step") is None
    assert ended.returncode == -signal.SIGKILL
    assert recovery.of_process(ended.returncode, note).retry == "smaller"


def test_a_beat_moves_the_files_time_and_needs_no_file(tmp_path):
    marker = StepMarker(tmp_path / "step")
    marker.beat()
    assert not marker.path.exists()
    with marker.around(1, 1, 64):
        os.utime(marker.path, (1, 1))
        marker.beat()
        assert marker.path.stat().st_mtime > 1


def test_a_note_costs_next_to_nothing(tmp_path):
    """About 0.1 ms on the machine it was written on; the shortest update there takes 10 ms."""
    marker, started = StepMarker(tmp_path / "step"), time.process_time()
    for update in range(200):
        with marker.around(update, 4, 64):
            pass
    assert (time.process_time() - started) / 200 < 0.002


def test_a_torn_note_is_none(tmp_path):
    (tmp_path / "step").write_text("{")
    assert left_behind(tmp_path / "step") is None


def warnings(speeds, swaps):
    pressure = Pressure()
    pressure._swap = 0
    found = [pressure.look(v, s) for v, s in zip(speeds, swaps, strict=True)]
    return [line for line in found if line]


def test_growing_swap_and_falling_speed_warn_once():
    found = warnings([100] * 10 + [40] * 20, [0] * 10 + [2_000_000_000] * 20)
    assert len(found) == 1
    assert "2.0 GB" in found[0]
    assert "from 100 to 40" in found[0]


@pytest.mark.parametrize(
    ("speeds", "swaps"),
    [
        ([100] * 30, [0] * 10 + [2_000_000_000] * 20),
        ([100] * 10 + [40] * 20, [0] * 30),
        ([100] * 10 + [40] * 2 + [100] * 18, [2_000_000_000] * 30),
    ],
)
def test_only_both_together_warn(speeds, swaps):
    assert warnings(speeds, swaps) == []
