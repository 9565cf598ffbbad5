"""`python -m stages plan` on a hybrid: its recurrent layers, the longest length, a refusal.

A small random Qwen3.5: two of four layers step through time, and each keeps heads x key size x
value size float32 numbers for every token. What the command says is held against steps that another
process really took.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_bench import folder_of

from stages.core import files, tables
from stages.core.config.settings import load_settings
from stages.core.machine import device
from stages.core.memory.plan import from_record
from stages.core.memory.points import Point, way_of
from stages.core.memory.survey import Surveyor
from stages.core.model import tiny
from stages.core.model.manifest import read_manifest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
LONGEST, BUDGET_GB = 96, 0.4
STATE = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
BYTES_A_TOKEN = 2 * 8 * 64 * 64 * 4
MEMORY = {"activation_cache": "off", "attention_block": "off", "grad_checkpoint": False}


def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DVC")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "300"}


def command(folder, *words):
    """Exit status, stdout, and stderr with blanks squeezed."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder after the split stage: a hybrid as `model.path`, and random examples."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = folder / "models/hybrid"
    model.mkdir(parents=True)
    folder_of("qwen3_5", model, vocab_size=tiny.VOCABULARY, **STATE)
    files.write_json(model / "tokenizer.json", tiny.tokenizer())
    files.write_json(model / "tokenizer_config.json", tiny.tokenizer_config())
    draw = np.random.default_rng(0)
    for split, lengths in (("train", [LONGEST, 20, 40, 64] * 2), ("valid", [])):
        rows = {
            "example": list(range(len(lengths))),
            "row": list(range(len(lengths))),
            "piece": [0] * len(lengths),
            "tokens": [draw.integers(1, 256, n).tolist() for n in lengths],
            "target_mask": [[place >= 1 for place in range(n)] for n in lengths],
        }
        with tables.writing(folder / f"data/examples/{split}.parquet", tables.EXAMPLES) as writer:
            writer.write_table(pa.table(rows, schema=tables.EXAMPLES))
    settings = {
        "model": {"path": "models/hybrid"},
        "train": {"updates": 2, "effective_batch_size": 4, "num_layers": 4},
        "memory": MEMORY,
    }
    (folder / "params.yaml").write_text(json.dumps(settings))
    status, _, said = command(folder, "stages.model")
    assert status == 0, said
    return folder


@pytest.fixture(scope="module")
def planned(workspace):
    status, out, said = command(
        workspace, "stages", "plan", "--json", f"memory.budget_gb={BUDGET_GB}"
    )
    assert status == 0, said
    return json.loads(out)


def steps(workspace, planned, lengths):
    """GB at the peak of one step of one example of each length, under the plan, in a child."""
    plan = from_record(planned["plan"])
    points = [Point("whole", 1, n, n - 1, plan.loss_chunk, way_of(plan)) for n in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        with Surveyor(load_settings(), read_manifest(), device.prepare("cpu")) as surveyor:
            survey = surveyor.ask(points, again=True)
    rest = survey.rest.resting(plan.activation_cache)
    return [(rest + survey.readings[point].peak) / 1e9 for point in points]


def test_recurrent_layers_are_recognised_and_their_state_is_told(workspace, planned):
    assert planned["recurrent_layers"] == 2
    status, _, said = command(workspace, "stages", "plan", f"memory.budget_gb={BUDGET_GB}")
    assert status == 0, said
    told = re.search(r"(\d) of the trained layers; the layers keep ([\d.]+) MB a token", said)
    assert told[1] == "2"
    assert float(told[2]) * 1e6 > BYTES_A_TOKEN
    # What is told is what a step rises by: the loss and the working of the layers come on top.
    short, long = steps(workspace, planned, [64, 128])
    assert 0.5 * (long - short) / 64 < float(told[2]) / 1e3 < 1.1 * (long - short) / 64


def test_the_predicted_peak_is_what_a_step_takes(workspace, planned):
    worst = planned["predicted"]["worst"]
    assert worst["width"] == LONGEST
    single = replace(from_record(planned["plan"]), activation_cache=False)
    point = Point("whole", *worst.values(), single.loss_chunk, way_of(single))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        with Surveyor(load_settings(), read_manifest(), device.prepare("cpu")) as surveyor:
            survey = surveyor.ask([point], again=True)
    measured = (survey.rest.resting(False) + survey.readings[point].peak) / 1e9
    assert planned["predicted"]["peak_gb"] == pytest.approx(measured, rel=0.05, abs=0.02)
    assert measured < BUDGET_GB


def test_the_longest_length_that_is_named_fits_and_a_longer_one_does_not(workspace, planned):
    longest = planned["longest_that_fits"]
    assert longest > LONGEST
    fits, fails = steps(workspace, planned, [longest, int(1.3 * longest)])
    assert fits < BUDGET_GB < fails


def test_a_budget_too_small_is_refused_with_the_numbers(workspace, planned):
    """The length that the refusal proposes fits, and the budget that it asks for is enough."""
    status, out, said = command(workspace, "stages", "plan", "--json", "memory.budget_gb=0.03")
    assert status == 2, said
    assert out == ""
    assert "Traceback" not in said
    assert "No plan fits the memory budget" in said
    assert "budget 0.03 GB (memory.budget_gb=0.03); the closest plan needs" in said
    assert "2 layers keep a state for every token" in said
    cap = re.search(r"split\.max_seq_length=(\d+), (the longest that fits|still too long)", said)
    assert int(cap[1]) < LONGEST
    (peak,) = steps(workspace, planned, [int(cap[1])])
    assert cap[2] == "still too long" or peak < 0.03 * 1.05
    enough = re.search(r"raise memory\.budget_gb to ([\d.]+)", said)[1]
    status, _, said = command(workspace, "stages", "plan", "--json", f"memory.budget_gb={enough}")
    assert status == 0, said
