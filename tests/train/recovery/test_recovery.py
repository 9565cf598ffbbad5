"""Out of memory in all its forms: the run ends with the weights of an undisturbed one."""

import json
import random
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from train_workspace import checkpoints, environment, make

from stages.core.config import schema
from stages.core.model import models
from stages.core.model.manifest import read_manifest
from stages.core.model.trainable import attach, trained

PROGRAM = Path(__file__).parent.with_name("faults.py")
LENGTHS = [20, 30, 15, 50, 44, 9, 33, 27, 60, 12, 31, 22]
TRAIN = {"updates": 12, "learning_rate": 1e-4, "updates_per_eval": 4}
RUN = {"updates_per_save": 3}
TOLERANCE = 1e-4
"""Of the weight change, in float32."""
IN_PLACE = ["malloc", "metal", "cuda", "numpy"]
DEATHS = ["kill", "abort", "late kill"]


def workspace(folder, **more):
    given = {"lengths": LENGTHS, "valid": [20, 31], "train": TRAIN, "run": RUN, **more}
    return make(folder, given.pop("lengths"), **given)


def start(folder, *words, faults=()):
    """Run the stage with faults to its end; its exit status and what it said."""
    (folder / "faults_done").unlink(missing_ok=True)
    given = {**environment(), "FAULTS": json.dumps(list(faults)), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, PROGRAM, *words],
        cwd=folder,
        env=given,
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return done.returncode, " ".join(done.stderr.split())


def weights(folder):
    return mx.load(str(folder / "adapters/adapters.safetensors"))


def initial(folder, train):
    """The trained arrays before the first update."""
    manifest = read_manifest(folder / "data/model.json")
    model, _ = models.load_model(models.folder(manifest, schema.Model(repo="builtin:tiny")))
    values = json.loads((folder / "params.yaml").read_text())["train"]
    lora = schema.LoraParameters(**values.pop("lora_parameters"))
    attach(model, schema.Train(**{**values, **train, "lora_parameters": lora}))
    return trained(model)


def apart(folder, other):
    """‖a − b‖ / ‖b − start‖ over all trained arrays, in float64."""
    a, b, begin = weights(folder), weights(other), initial(other, {})
    assert a.keys() == b.keys() == begin.keys()
    flat = lambda x: np.concatenate([np.array(x[k], np.float64).ravel() for k in sorted(x)])
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b) - flat(begin))


def run_record(folder):
    return json.loads((folder / "reports/train/run.json").read_text())


def history(folder):
    """(update, targets, tokens) of every update: what was trained, whatever the cut."""
    rows = (folder / "reports/train/history.csv").read_text().splitlines()[1:]
    return [(row.split(",")[0], *row.split(",")[3:5]) for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = workspace(tmp_path_factory.mktemp("undisturbed"))
    status, said = start(folder)
    assert status == 0, said
    assert run_record(folder)["recoveries"] == []
    return folder


def fault(update, kind, draw=None):
    if kind == "late kill":
        return {"update": update, "kind": "kill", "after_s": (draw or random).uniform(0.0005, 0.02)}
    return {"update": update, "kind": kind}


def check_same(folder, undisturbed):
    assert apart(folder, undisturbed) < TOLERANCE
    assert history(folder) == history(undisturbed)
    assert checkpoints(folder) == []
    assert not list(folder.glob(".cache/checkpoints/*/*.json"))


def test_out_of_memory_in_the_process_and_of_the_process(tmp_path, undisturbed):
    folder = workspace(tmp_path / "work")
    faults = [fault(2, "malloc"), fault(4, "validation"), fault(5, "abort"), fault(8, "optimizer")]
    status, said = start(folder, faults=faults)
    assert status == 0, said
    check_same(folder, undisturbed)
    record = run_record(folder)
    assert [event["kind"] for event in record["recoveries"]] == ["memory"] * 4
    assert [event["update"] for event in record["recoveries"]] == [2, 4, 5, 8]
    changed = [list(event["changed"]) for event in record["recoveries"]]
    assert changed[0] == ["batch_size", "batch_tokens"]
    assert record["recoveries"][0]["changed"]["batch_size"] == [4, 2]
    assert record["plan"]["batch_size"] == 1
    assert record["plan"]["recompute"] > 0
    assert record["resumed_at_updates"] == [3, 6]
    assert "update 2: out of memory: [malloc] Unable to allocate 1073741824 bytes.; again" in said
    assert "Insufficient Memory" in said
    assert "Traceback" not in said


def test_too_many_buffers_and_a_hang_are_tried_again_in_a_fresh_process(tmp_path, undisturbed):
    folder = workspace(tmp_path / "work")
    faults = [fault(2, "handles"), fault(5, "hang")]
    status, said = start(folder, "run.step_timeout_s=20", faults=faults)
    assert status == 0, said
    check_same(folder, undisturbed)
    record = run_record(folder)
    assert [event["kind"] for event in record["recoveries"]] == ["handles", "hang"]
    assert [event["changed"] for event in record["recoveries"]] == [{}, {}]
    assert record["resumed_at_updates"][0] == 1  # nothing was lost


def test_the_smallest_plan_gives_up_with_numbers(tmp_path):
    memory = {"batch_size": 1, "grad_checkpoint": True, "attention_block": 16, "loss_chunk": 16}
    folder = workspace(tmp_path / "work", memory=memory)
    status, said = start(folder, faults=[{**fault(5, "malloc"), "always": True}])
    assert status == 1, said
    assert "Out of memory, and there is no smaller plan" in said
    assert "update 5, micro-batches of up to 1 ×" in said
    assert " GB for a step" in said
    assert checkpoints(folder)[-1] == 4  # saved when it gave up in place
    status, said = start(folder)
    assert status == 0, said
    assert "goes on after update 4" in said


def test_a_plan_that_needs_more_address_space_than_there_is(tmp_path):
    """MLX dies of SIGSEGV or says so, as it happens; both lead to a plan that fits."""
    if sys.platform != "linux":
        pytest.skip("address-space limits work on Linux only")
    given = {
        "lengths": [512] * 16,
        "valid": [],
        "train": {**TRAIN, "updates": 3, "effective_batch_size": 16},
        "memory": {"batch_size": 16, "attention_block": "off", "activation_cache": "off"},
    }
    free, narrow = workspace(tmp_path / "free", **given), workspace(tmp_path / "narrow", **given)
    status, said = start(free)
    assert status == 0, said
    limit = {"update": 1, "kind": "address", "bytes": 150_000_000, "always": True}
    status, said = start(narrow, faults=[limit])
    assert status == 0, said
    check_same(narrow, free)
    record = run_record(narrow)
    assert {event["kind"] for event in record["recoveries"]} == {"memory"}
    assert record["plan"]["batch_size"] < 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_four_events_at_random(tmp_path, undisturbed, seed):
    """Twenty in all."""
    draw = random.Random(seed)
    folder = workspace(tmp_path / "work")
    kinds = [draw.choice(IN_PLACE), draw.choice(DEATHS), draw.choice(DEATHS)]
    kinds.append(draw.choice(IN_PLACE + DEATHS))
    draw.shuffle(kinds)
    updates = sorted(draw.sample(range(1, 13), 4))
    faults = [fault(update, kind, draw) for update, kind in zip(updates, kinds, strict=True)]
    status, said = start(folder, faults=faults)
    assert status == 0, said
    check_same(folder, undisturbed)
    events = run_record(folder)["recoveries"]
    assert len(events) == 4
    assert {event["kind"] for event in events} <= {"memory", "killed"}
