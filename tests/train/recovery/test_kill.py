"""Whatever is killed, nothing runs on, and the next start gives what an undisturbed run gives."""

import random
import subprocess
import time

import psutil
import pytest
from processes import INT, KILL, TERM, Run, most_seconds, once
from train_workspace import checkpoints, command, environment, make, results, settings

LENGTHS = [20, 30, 15, 50, 44, 9, 33, 27, 60, 12]
RUN = {"updates_per_save": 3, "keep_last": 2}
TRAIN = {
    "updates": 40,
    "updates_per_eval": 7,
    "lora_parameters": {"rank": 2, "dropout": 0.1},
    "schedule": {"name": "cosine", "warmup": 4},
    "clip_norm": 2.0,
}
WAYS = ["group", "dvc", "parent"]
"""Killing the child alone is no end of the run: see test_recovery.py."""


def workspace(folder):
    return make(folder, LENGTHS, valid=[20, 31], train=TRAIN, run=RUN)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results of a run that nobody disturbs, and its seconds."""
    folder = workspace(tmp_path_factory.mktemp("undisturbed"))
    start = time.monotonic()
    status, said = once(folder)
    assert status == 0, said
    assert checkpoints(folder) == []
    return results(folder), time.monotonic() - start


def disturb(folder, way, number, moment):
    """Start, wait for a checkpoint (int) or seconds (float), send the signal, see all go."""
    run = Run(folder, dvc=way == "dvc")
    if isinstance(moment, int):
        run.wait_for_checkpoint(moment)
    else:
        time.sleep(moment)
    tree = run.tree()
    run.end(way, number)
    if number == KILL or way != "parent":
        # A parent that gets TERM waits for its child's checkpoint: that is no orphan.
        orphans = [x for x in tree if x.pid != run.outer.pid] if way in ("dvc", "parent") else tree
        assert run.wait_until_gone(orphans) < most_seconds()
    return run


def test_killed_three_ways_one_after_the_other(tmp_path, undisturbed):
    folder = workspace(tmp_path / "work")
    for way, number, update in [
        ("group", KILL, 3),
        ("dvc", KILL, 9),
        ("parent", KILL, 15),
    ]:
        run = disturb(folder, way, number, update)
        assert max(checkpoints(folder)) >= update
        assert not (folder / "adapters").exists()
    assert "Traceback" not in run.said()
    status, said = once(folder)
    assert status == 0, said
    assert f"goes on after update {checkpoints_said(said)}" in said
    assert results(folder) == undisturbed[0]
    assert checkpoints(folder) == []


def checkpoints_said(said):
    return int(said.split("goes on after update ")[1].split(",")[0])


@pytest.mark.parametrize(("way", "number", "status"), [("parent", INT, 130), ("child", TERM, 143)])
def test_a_signal_writes_a_checkpoint_of_the_last_update(tmp_path, way, number, status):
    folder = workspace(tmp_path / "work")
    settings(folder, {**TRAIN, "updates": 400}, run={"updates_per_save": 1000})
    run = Run(folder)
    while "validation loss" not in run.said() and run.outer.poll() is None:
        time.sleep(0.02)
    run.end(way, number)
    assert run.finish() == status
    (update,) = checkpoints(folder)
    assert 7 <= update < 400
    rows = next(folder.glob(".cache/checkpoints/*/0*/history.csv")).read_text().splitlines()
    assert len(rows) == 1 + update


def test_a_second_start_waits_for_the_first_and_names_it(tmp_path):
    folder = workspace(tmp_path / "work")
    settings(folder, {**TRAIN, "updates": 2000}, run=RUN)
    first = Run(folder)
    first.wait_for_checkpoint(3)
    status, said = once(folder, log="second.txt")
    first.end("group", KILL)
    first.wait_until_gone(first.tree())
    assert status == 2
    assert f"waiting for process {first.outer.pid}" in said
    assert (
        f"Another process works on this run's checkpoints found: process {first.outer.pid}" in said
    )


def test_a_run_started_by_hand_outlives_its_shell(tmp_path, undisturbed):
    folder = workspace(tmp_path / "work")
    line = f"{' '.join(command())} > log.txt 2>&1 &"
    subprocess.run(["/bin/sh", "-c", line], cwd=folder, env=environment(), check=True)
    end = time.monotonic() + 120
    while not (folder / "adapters").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert results(folder) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_random_moments(tmp_path, undisturbed, seed):
    draw = random.Random(seed)
    folder = workspace(tmp_path / "work")
    expected, seconds = undisturbed
    for _ in range(draw.randint(1, 3)):
        way, number = draw.choice(WAYS), draw.choice([TERM, KILL])
        run = disturb(folder, way, number, draw.uniform(0.0, seconds))
        run.wait_until_gone(run.tree())
        if (folder / "adapters").exists():
            break
    if not (folder / "reports/train/run.json").exists() or not (folder / "adapters").exists():
        status, said = once(folder)
        assert status == 0, said
    assert results(folder) == expected
    assert not [x for x in psutil.process_iter(["cwd"]) if x.info["cwd"] == str(folder)]
