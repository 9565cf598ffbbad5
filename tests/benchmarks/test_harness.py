"""The benchmark harness: turns, medians, refusal where losses differ, and both sides for real."""

import json
import statistics
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.datasets import CacheDataset

from benchmarks import child, choice, figures, gpu, machine, shapes, subject, theirs, turns
from benchmarks.spec import OURS, THEIRS, Spec, from_text
from stages.core import files
from stages.core.tables import read_examples

NANO = "qwen3-nano"
LENGTHS = [(3, 9), (5, 30), (2, 17), (9, 40), (4, 12), (6, 33), (1, 21), (7, 26)]
THEIR_SPEC = Spec(
    THEIRS, "examples.parquet", 40, 2, 2, 4, passes=2, shape=NANO, dtype="float32", kind="cpu"
)
OUR_SPEC = replace(THEIR_SPEC, side=OURS)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choice.write(tmp_path / "examples.parquet", choice.random(LENGTHS, 512))
    return tmp_path


def result(first, later, peak, loss=2.0, targets=100, **more):
    return {
        "first_s": first,
        "later_s": [later],
        "peak_mb": peak,
        "later_peak_mb": peak,
        "above_mb": peak - 100.0,
        "held_mb": 100.0,
        "setup_s": 0.0,
        "loss": loss,
        "targets": targets,
        "tokens": 60,
        "padded_tokens": 80,
        "dtype": "float32",
        **more,
    }


def test_variants_are_measured_in_turn_and_compared_by_medians(tmp_path):
    specs = {"mlx-lm": THEIR_SPEC, "ours": OUR_SPEC}
    answers = {THEIRS: [(9, 6, 500), (7, 8, 540), (8, 7, 520)], OURS: [(4, 2, 200), (2, 1, 240)]}
    answers[OURS].append((3, 3, 220))
    calls = []

    def measure(spec):
        calls.append(spec.side)
        return result(*answers[spec.side].pop(0))

    report = turns.take("figure", specs, 3, measure, tmp_path)
    assert calls == [THEIRS, OURS] * 3
    written = files.read_json(tmp_path / "figure.json")
    assert written == json.loads(json.dumps(report))
    ours = written["variants"]["ours"]
    assert ours["first_s"] == {"median": 3, "low": 2, "high": 4, "values": [4, 2, 3]}
    assert ours["ratios"] == {
        "first": pytest.approx(8 / 3),
        "later": pytest.approx(7 / 2),
        "above": pytest.approx(120 / 420),
        "peak": pytest.approx(220 / 520),
    }
    assert ours["padding_share"] == 0.25
    assert [len(x) for x in written["runs"].values()] == [3, 3]
    line = list(turns.lines(report))[1]
    assert "2.67 times mlx-lm's speed" in line
    assert "29% of mlx-lm's" in line


@pytest.mark.parametrize("change", [{"loss": 2.001}, {"targets": 99}, {"loss": float("nan")}])
def test_no_figure_where_the_losses_differ(tmp_path, change):
    specs = {"mlx-lm": THEIR_SPEC, "ours": OUR_SPEC}
    measure = lambda spec: result(8, 8, 500) if spec.side == THEIRS else result(1, 1, 1)
    good = turns.summary(specs, {name: [measure(spec)] for name, spec in specs.items()})
    assert good["variants"]["ours"]["agrees"]
    runs = {"mlx-lm": [result(8, 8, 500)], "ours": [{**result(1, 1, 200), **change}]}
    bad = turns.summary(specs, runs)
    assert not bad["variants"]["ours"]["agrees"]
    assert "ratios" not in bad["variants"]["ours"]
    line = list(turns.lines(bad))[1]
    assert "no figure" in line
    assert "times" not in line


def test_a_child_that_dies_is_written_down_and_the_others_go_on(tmp_path):
    specs = {"mlx-lm": THEIR_SPEC, "ours": OUR_SPEC}

    def measure(spec):
        if spec.side == OURS:
            raise RuntimeError("status -9")
        return result(8, 8, 500)

    report = turns.take("figure", specs, 2, measure, tmp_path)
    assert report["variants"]["ours"] == {"failed": "status -9", "agrees": False}
    assert report["variants"]["mlx-lm"]["agrees"]
    assert "failed: status -9" in list(turns.lines(report))[1]


def test_examples_are_those_that_mlx_lm_can_train_too(tmp_path):
    rows = [
        (np.arange(6), [0, 0, 1, 1, 0, 0]),  # what follows the last target is cut off
        (np.arange(6), [0, 1, 0, 0, 1, 1]),  # two ranges: left out
        (np.arange(6), [0, 0, 0, 0, 0, 1]),  # no target within the cap
        (np.arange(3), [1, 1, 1]),  # a first token is never predicted
    ]
    given = [(x.astype(np.int32), np.array(mask, bool)) for x, mask in rows]
    choice.write(tmp_path / "all.parquet", given)
    kept = choice.usable(read_examples(tmp_path / "all.parquet"), cap=5)
    assert [tokens.tolist() for tokens, _ in kept] == [[0, 1, 2, 3], [0, 1, 2]]
    assert [mask.tolist() for _, mask in kept] == [
        [False, False, True, True],
        [False, True, True],
    ]
    lengths = lambda chosen: [len(tokens) for tokens, _ in chosen]
    many = choice.random([(1, n) for n in (9, 3, 7, 5, 11)], 50)
    assert lengths(choice.spread(many, 3)) == [3, 7, 11]
    assert lengths(choice.longest(many, 2)) == [9, 11]
    with pytest.raises(ValueError, match="5 usable examples, 6 wanted"):
        choice.spread(many, 6)


def test_a_spec_travels_as_one_word():
    spec = replace(OUR_SPEC, plan={"recompute": 1, "activation_cache": True})
    assert from_text(spec.text()) == spec


def test_random_shapes_are_as_large_as_their_manifest_says():
    model = shapes.build(NANO, "bfloat16")
    arrays = [x for _, x in tree_flatten(model.parameters())]
    facts = shapes.manifest(NANO, "bfloat16")
    assert {x.dtype for x in arrays} == {mx.bfloat16}
    assert (facts.parameters, facts.bytes) == (
        sum(x.size for x in arrays),
        sum(x.nbytes for x in arrays),
    )
    # The published sizes: 0.6 and 4.02 thousand million.
    assert round(shapes.manifest("qwen3-0.6b", "bfloat16").parameters / 1e9, 2) == 0.60
    assert round(shapes.manifest("qwen3-4b", "bfloat16").parameters / 1e9, 2) == 4.02


def test_mlx_lms_loss_without_its_padding_target_is_numpys(workspace):
    model = shapes.build(NANO, "float32")
    examples = read_examples(workspace / "examples.parquet")
    every, counted = [], 0
    for i in range(len(examples)):
        tokens, mask = examples.example(i)
        logits = np.array(model(mx.array(tokens)[None])[0], np.float64)[:-1]
        log_sum = np.log(np.exp(logits).sum(axis=1))
        every += (log_sum - logits[np.arange(len(tokens) - 1), tokens[1:]])[mask[1:]].tolist()
        counted += int(mask.sum())
    dataset = CacheDataset(theirs.Rows(examples))
    as_it_is, corrected, targets = theirs.losses(model, dataset, THEIR_SPEC)
    assert corrected == pytest.approx(statistics.fmean(every), rel=1e-6)
    assert targets == counted == len(every)
    assert as_it_is != pytest.approx(corrected, rel=1e-4)


def test_both_sides_are_measured_on_the_same_losses(workspace):
    specs = {
        "mlx-lm": THEIR_SPEC,
        "ours": OUR_SPEC,
        "cached": replace(OUR_SPEC, plan={"activation_cache": True, "recompute": 1}),
    }
    report = turns.take("both", specs, 1, child.measured, workspace)
    variants = report["variants"]
    assert [x["agrees"] for x in variants.values()] == [True] * 3
    assert {x["targets"] for x in variants.values()} == {sum(n - first for first, n in LENGTHS)}
    assert {x["tokens"] for x in variants.values()} == {sum(n for _, n in LENGTHS)}
    # Theirs pads to a multiple of 32 and one, at most the cap, in the order of the file.
    assert variants["mlx-lm"]["padded_tokens"] == 2 * (32 + 39 + 39 + 32)
    assert variants["ours"]["padded_tokens"] < variants["mlx-lm"]["padded_tokens"]
    assert all(x["first_s"]["median"] > 0 for x in variants.values())
    assert all(len(x["later_s"]["values"]) == 1 for x in variants.values())
    assert list(workspace.glob(".cache/activations/*")) == []


def test_equal_rows_are_mlx_lms_batch_size_at_any_length(workspace):
    examples = read_examples(workspace / "examples.parquet")
    facts = shapes.manifest(NANO, "float32")
    plan = subject.equal_rows(OUR_SPEC, facts, examples)
    assert (plan.batch_size, plan.batch_tokens) == (2, 2 * 40)
    wider = subject.equal_rows(replace(OUR_SPEC, plan={"batch_size": 4}), facts, examples)
    assert (wider.batch_size, wider.batch_tokens) == (4, 4 * 40)


def test_what_a_machine_is_names_no_path():
    facts = machine.facts()
    assert facts["versions"]["mlx"] == mx.__version__
    assert str(machine.REPOSITORY) not in json.dumps(facts)


def test_the_corpus_lengths_for_a_gpu_are_there():
    pairs = json.loads(gpu.LENGTHS.read_text())
    assert len(pairs) == 672
    assert all(0 < first < length for first, length in pairs)
    rows = gpu.examples(128, 2048, 512)
    sizes = sorted(len(tokens) for tokens, _ in rows)
    assert (len(rows), sizes[-1]) == (128, 2048)
    assert sizes[0] < 100


@pytest.mark.slow
def test_the_command_works_on_the_tiny_model(tmp_path):
    words = ["--quick", "--variants", "ours, equal;ours, frozen", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=machine.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = files.read_json(tmp_path / "default.json")
    names = ["mlx-lm", "ours, equal rows", "ours, frozen layers cached"]
    assert sorted(report["variants"]) == names
    assert all(x["agrees"] and x["ratios"]["first"] > 0 for x in report["variants"].values())
    held = [report["variants"][name]["held_mb"]["median"] for name in names]
    assert held[2] < held[1] == pytest.approx(held[0])


def test_the_default_figure_compares_what_it_says(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "_file", lambda job, name, *_: name)
    specs = figures.default(figures.Job(tmp_path))
    assert next(iter(specs.values())) == Spec(THEIRS, "examples-32-384.parquet", 384, 8, 4, 8, 2)
    assert {(x.rows, x.effective, x.layers, x.passes) for x in specs.values()} == {(4, 8, 8, 2)}
    every = {name for make in figures.GROUPS.values() for name in make(figures.Job(tmp_path))}
    assert {"layers-4", "layers-all", "length-1024", "rows-1", "rows-16"} <= every
