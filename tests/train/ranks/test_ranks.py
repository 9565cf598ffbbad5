"""One run in several processes: the same run as in one, whoever goes on with it or dies."""

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pytest
from mlx.utils import tree_flatten
from processes import KILL, TERM, Run, once
from train_workspace import checkpoints, environment, make, settings

from stages.core import files
from stages.core.config import schema
from stages.core.machine import hosts, launch
from stages.core.model import models
from stages.core.model.manifest import read_manifest
from stages.core.model.trainable import attach

LENGTHS = np.random.default_rng(5).integers(8, 90, 61).tolist()
"""Ten updates of six and one of a single example: that leaves a rank without work."""
TRAIN = {
    "updates": 20,
    "updates_per_eval": 7,
    "learning_rate": 1e-4,
    "effective_batch_size": 6,
    "clip_norm": 0.5,
    "schedule": {"name": "cosine", "warmup": 4},
}
RUN = {"updates_per_save": 5, "keep_last": 2}
TWO = "run.launch.hosts=2"
SECONDS = 60
"""For what takes one or two, on a machine that has nothing else to do."""


def workspace(folder, **train):
    return make(folder, LENGTHS, valid=[20, 31, 44], train={**TRAIN, **train}, run=RUN)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process."""
    folder = workspace(tmp_path_factory.mktemp("alone"))
    status, said = once(folder)
    assert status == 0, said
    return folder


def change(folder):
    """What training has added to the arrays it started from."""
    base, _ = models.load_model(
        models.folder(read_manifest(folder / "data/model.json"), schema.Model(repo="builtin:tiny"))
    )
    attach(base, schema.Train(num_layers=2, lora_parameters=schema.LoraParameters(2), seed=3))
    start = dict(tree_flatten(base.trainable_parameters()))
    after = mx.load(str(folder / "adapters/adapters.safetensors"))
    assert set(start) == set(after)
    return {name: np.array(after[name]) - np.array(x) for name, x in start.items()}


def distance(folder, other):
    """‖a − b‖ over ‖b‖ of two runs' changes, over all arrays together."""
    a, b = change(folder), change(other)
    difference = sum(((a[name] - b[name]) ** 2).sum() for name in b)
    return float(np.sqrt(difference / sum((x**2).sum() for x in b.values())))


def table(folder, name):
    rows = (folder / "reports/train" / name).read_text().splitlines()
    return [[float(x) for x in row.replace("True", "1").replace("False", "0").split(",")]
            for row in rows[1:]]  # fmt: skip


def require_same(folder, alone):
    """Weights to 1e-5 of their change; every row of both result files."""
    assert distance(folder, alone) < 1e-5
    for name in ("history.csv", "valid.csv"):
        assert np.allclose(table(folder, name), table(alone, name), rtol=1e-5)
    config = "adapters/adapter_config.json"
    assert (folder / config).read_text() == (alone / config).read_text()


def test_two_ranks_are_one_process(tmp_path, alone):
    folder = workspace(tmp_path / "work")
    status, said = once(folder, TWO)
    assert status == 0, said
    require_same(folder, alone)
    assert said.count("adapters/ holds update") == 1  # one of them talks
    assert files.read_json(folder / "reports/train/run.json")["ranks"] == 2
    (kept,) = (folder / ".cache/checkpoints").iterdir()
    assert {path.name for path in kept.iterdir()} <= {"lock", "working"}


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on(tmp_path, alone, before, after):
    folder = workspace(tmp_path / "work", stop_at_update=8)
    status, said = once(folder, f"run.launch.hosts={before}")
    assert status == 0, said
    settings(folder, TRAIN, run=RUN)
    status, said = once(folder, f"run.launch.hosts={after}")
    assert status == 0, said
    assert "goes on after update 8" in said
    require_same(folder, alone)


def rank(run, number):
    """The process of one rank, by what the launcher gave it."""
    for process in run.tree():
        try:
            words, its = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if any(x.startswith("--child=") for x in words) and its.get("MLX_RANK") == str(number):
            return process
    return None


def begun(folder, *words, update=5):
    run = Run(folder, *words)
    run.wait_for_checkpoint(update)
    assert run.outer.poll() is None, run.said()
    return run


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_run_at_once(tmp_path, number):
    folder = workspace(tmp_path / "work")
    settings(folder, {**TRAIN, "updates": 2000}, run=RUN)
    run = begun(folder, TWO)
    tree = run.tree()
    rank(run, number).send_signal(KILL)
    took = run.wait_until_gone(tree)
    assert took < SECONDS
    assert run.finish() == 1
    said = run.said()
    assert f"error: Rank {number} of 2 (counted from 0) is lost" in said
    assert "found: ended by SIGKILL" in said
    assert "Traceback" not in said
    assert not (folder / "adapters").exists()
    assert not (folder / "reports/train").exists()
    updates = checkpoints(folder)
    settings(folder, {**TRAIN, "updates": 2000, "stop_at_update": max(updates) + 2}, run=RUN)
    status, said = once(folder, TWO)
    assert status == 0, said
    assert f"goes on after update {max(updates)}," in said
    assert "passed over" not in said


@pytest.mark.parametrize("whom", ["stage", pytest.param("rank 1", marks=pytest.mark.slow)])
def test_a_signal_to_any_of_them_leaves_one_checkpoint(tmp_path, whom):
    folder = workspace(tmp_path / "work")
    settings(folder, {**TRAIN, "updates": 2000}, run={"updates_per_save": 100_000})
    run = Run(folder, TWO)
    while "validation loss" not in run.said() and run.outer.poll() is None:
        time.sleep(0.05)
    tree = run.tree()
    if whom == "stage":
        run.outer.send_signal(TERM)
    else:
        rank(run, 1).send_signal(TERM)
    took = run.wait_until_gone(tree)
    assert took < SECONDS
    assert run.finish() == 143, run.said()
    (update,) = checkpoints(folder)
    assert update >= 7
    settings(folder, {**TRAIN, "updates": 2000, "stop_at_update": update + 2}, run=RUN)
    status, said = once(folder, TWO)
    assert status == 0, said
    assert f"goes on after update {update}," in said
    updates = [int(row[0]) for row in table(folder, "history.csv")]
    assert updates == list(range(1, update + 3))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["supervisor", "launcher"])
def test_nobody_lives_on_without_who_started_them(tmp_path, which):
    folder = workspace(tmp_path / "work")
    settings(folder, {**TRAIN, "updates": 2000}, run=RUN)
    run = begun(folder, TWO)
    tree = run.tree()
    launcher = next(x for x in tree if any(w.startswith("--launch=") for w in x.cmdline()))
    below = [launcher, *launcher.children()]
    assert len(below) == 3
    (run.outer if which == "supervisor" else launcher).send_signal(KILL)
    _, alive = psutil.wait_procs(below, timeout=SECONDS)
    assert not alive
    if which == "launcher":  # as after the death of a child alone: others go on
        while all("--child=" not in " ".join(x.cmdline()) for x in run.tree()):
            assert run.outer.poll() is None
            time.sleep(0.05)
        run.end("group", KILL)
    run.wait_until_gone([])
    run.log.close()


@pytest.mark.parametrize("number", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_out_of_memory_in_a_rank_starts_all_again_with_a_smaller_plan(
    tmp_path, alone, monkeypatch, number
):
    folder = workspace(tmp_path / "work")
    fault = {"update": 8, "kind": "malloc", "rank": number}
    monkeypatch.setenv("FAULTS", json.dumps([fault]))
    program = [sys.executable, str(Path(__file__).parent.with_name("faults.py")), TWO]
    done = subprocess.run(
        program,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    require_same(folder, alone)
    run = files.read_json(folder / "reports/train/run.json")
    assert [(one["kind"], one["update"]) for one in run["recoveries"]] == [("memory", 8)]
    assert run["plan"]["batch_size"] < 3  # half of the three that a rank has of six
    assert run["resumed_at_updates"] == [7]
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("backend", ["ring", "nccl"])
def test_what_ranks_say_to_each_other(tmp_path, backend):
    if not mx.distributed.is_available(backend):
        pytest.skip(f"this MLX has no {backend}")
    given = launch.environments(schema.Launch(hosts=2, backend=backend), tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), backend]
    started = [
        subprocess.Popen(
            command,
            env={**environment(), **more},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for more in given
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    for number, text in enumerate(said):
        assert json.dumps({"rank": number, "claims": "hold"}) in text, text


def test_cores_are_shared(monkeypatch, tmp_path):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    assert [launch.threads_each(n) for n in (1, 2, 3, 9)] == [8, 4, 2, 1]
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert [launch.threads_each(n) for n in (1, 2, 8)] == [2, 2, 1]
    given = launch.environments(schema.Launch(hosts=4), tmp_path)
    assert {more["OPENBLAS_NUM_THREADS"] for more in given} == {"2"}


@pytest.mark.parametrize(
    ("seen", "expected"), [(None, ["0", "1"]), ("3,5,6", ["3", "5"]), ("4", ["4", "4"])]
)
def test_with_nccl_every_rank_sees_its_own_gpu(monkeypatch, tmp_path, seen, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    given = launch.environments(schema.Launch(hosts=2, backend="nccl"), tmp_path)
    assert [more["CUDA_VISIBLE_DEVICES"] for more in given] == expected
    assert [more["MLX_RANK"] for more in given] == ["0", "1"]
    assert {more["MLX_WORLD_SIZE"] for more in given} == {"2"}
    assert len({more["NCCL_PORT"] for more in given}) == 1


def test_an_mlx_without_the_backend_says_so(tmp_path):
    if mx.distributed.is_available("nccl"):
        pytest.skip("this MLX has nccl")
    folder = workspace(tmp_path / "work")
    status, said = once(folder, TWO, "run.launch.backend=nccl")
    assert status == 2, said
    assert "This MLX does not have the backend" in said
    assert "run.launch.backend=ring works on every device" in said


def own_address():
    """An address of this machine beside the loopback, None where it has no network."""
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == hosts.socket.AF_INET and not entry.address.startswith("127.")
    ]
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8 on the loopback")
def test_mlx_launch_starts_what_is_on_other_hosts(tmp_path, alone, monkeypatch):
    """ssh is a stand-in that runs the command here; everything else is real."""
    if own_address() is None:
        pytest.skip("this machine has no address but the loopback's")
    folder = workspace(tmp_path / "work")
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\nshift 3\nstty() { :; }\nhost=$1; shift\neval "$1"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{hosts.os.environ['PATH']}")
    status, said = once(folder, f"run.launch.hosts=[{own_address()},127.0.0.2]")
    assert status == 0, said
    require_same(folder, alone)


def test_hosts_are_told_to_mlx_launch_by_address(monkeypatch):
    known = {"here": "10.0.0.1", "there": "10.0.0.2"}
    monkeypatch.setattr(hosts, "address", known.__getitem__)
    monkeypatch.setattr(hosts, "is_here", lambda ip: ip == "10.0.0.1")
    assert hosts.hostfile(["here", "there", "there"]) == [
        {"ssh": "127.0.0.1", "ips": ["10.0.0.1"]},
        {"ssh": "there", "ips": ["10.0.0.2"]},
        {"ssh": "there", "ips": ["10.0.0.2"]},
    ]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("[nowhere.invalid,127.0.0.1]", "A host's address is not known"),
        ("[127.0.0.2,127.0.0.1]", "The first host of a run must be this machine"),
        ("[127.0.0.1,127.0.0.2]", "Other hosts cannot reach this machine by that name"),
        ("0", "run.launch.hosts names no process"),
        ("[]", "run.launch.hosts names no process"),
    ],
)
def test_hosts_that_cannot_be_used_are_refused(tmp_path, names, told):
    folder = workspace(tmp_path / "work")
    status, said = once(folder, f"run.launch.hosts={names}")
    assert status == 2, said
    assert f"error: {told}" in said
    assert "Traceback" not in said
