"""`python -m stages prove`: passes on mlx-lm's own models, and a planted fault is seen."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import proof_workspace
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.trainer import default_loss

from stages.commands import prove
from stages.commands.proving import choice, finding, gradients, reference, runs, trial
from stages.core.config import settings
from stages.core.errors import UserError
from stages.core.machine import device
from stages.core.tables import Examples
from stages.core.update import batching
from stages.core.update.step import Step
from stages.train import optimizer


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(folder, *args, **given):
    """A trial on a small model."""
    proof_workspace.make(folder, *args, **given)
    loaded = settings.load_settings()
    return trial.load(loaded, device.prepare("cpu"))


def examples(lengths, first_target=1):
    place = np.concatenate([np.arange(n) for n in lengths])
    return Examples(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.arange(sum(lengths), dtype=np.int32),
        target_mask=place >= first_target,
        row=np.arange(len(lengths)),
        piece=np.zeros(len(lengths), np.int32),
    )


def missed(findings):
    return [x.what for x in findings if x.passed is False]


def gradients_of(subject, part):
    with gradients.compared(subject) as against:
        return list(part(subject, against))


def test_all_of_it_passes_and_is_reported(workspace, capsys):
    proof_workspace.make(workspace)
    before = sorted(x.name for x in workspace.rglob("*"))
    assert prove.main(["--json", "memory.loss_chunk=32"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = json.loads((workspace / "reports/prove.json").read_text())
    assert printed == report
    assert report["ok"]
    assert report["device"]["versions"]["mlx"] == mx.__version__
    parts = [x["part"] for x in report["results"]]
    assert set(parts) == {"cuts", "memory", "updates", "resume"}
    assert all(x["passed"] for x in report["results"])
    limits = {x["part"]: x["tolerance"] for x in report["results"]}
    assert limits == {"cuts": 1e-5, "memory": 1e-5, "updates": 1e-4, "resume": 0.0}
    micros = [x["what"] for x in report["results"] if x["what"].startswith("micro-batches")]
    assert len(micros) == 3
    # Nothing is left behind but the report, and empty folders of the cache.
    after = {x.name for x in workspace.rglob("*") if x.is_file()}
    assert after - set(before) == {"prove.json"}


CASES = [
    (model, kind)
    for model in proof_workspace.MODELS
    for kind in ("lora", "dora", "full")
    if (model, kind) not in {("llama", "lora"), ("experts", "dora"), ("4-bit", "full")}
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_it_passes_on_every_kind_of_model_and_training(workspace, model, kind):
    proof_workspace.make(workspace, model, fine_tune_type=kind)
    assert prove.main([]) == 0
    report = json.loads((workspace / "reports/prove.json").read_text())
    assert [x["what"] for x in report["results"] if x["passed"] is not True] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"num_layers": -1}, ["activation cache", "all of these together"]),
        ({"effective_batch_size": 1}, []),
        ({"valid": (), "effective_batch_size": 3, "optimizer": "sgd"}, []),
    ],
)
def test_it_passes_at_the_ends_of_the_settings(workspace, given, unused):
    proof_workspace.make(workspace, **given)
    assert prove.main([]) == 0
    report = json.loads((workspace / "reports/prove.json").read_text())
    assert [x["what"] for x in report["results"] if x["passed"] is None] == unused


@pytest.mark.parametrize(("model", "kind"), [("experts", "dora"), ("4-bit", "full")])
def test_what_mlx_lm_cannot_train_is_said_plainly(workspace, capsys, model, kind):
    proof_workspace.make(workspace, model, fine_tune_type=kind)
    assert prove.main([]) == 2
    said = " ".join(capsys.readouterr().err.split())
    expected = {"experts": "cannot add dora layers", "4-bit": "weights that are not quantized"}
    assert expected[model] in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_bfloat16_is_measured_by_two_paddings_and_passes(workspace):
    proof_workspace.make(workspace, dtype="bfloat16")
    assert prove.main([]) == 0
    report = json.loads((workspace / "reports/prove.json").read_text())
    assert not report["float32"]
    limits = {x["part"]: x["tolerance"] for x in report["results"]}
    # Two epsilons of bfloat16 (2 ** -7) for a gradient, eight for weights.
    assert (limits["cuts"], limits["updates"]) == (2**-6, 2**-4)


def test_a_divisor_of_each_micro_batch_is_seen(workspace, monkeypatch):
    # What mlx-lm's accumulation does: each micro-batch is averaged over its own targets.
    subject = made(workspace)
    honest = Step.gradient

    def own_divisor(self, micro, divisor, *rest):
        return honest(self, micro, micro.targets, *rest)

    monkeypatch.setattr(Step, "gradient", own_divisor)
    names = missed(gradients_of(subject, gradients.cuts))
    assert "row by row without padding" in names
    assert sum(name.startswith("micro-batches of at most") for name in names) == 2
    assert "whole, padded to 102" not in names
    assert missed(runs.updates(subject, workspace)) != []


def test_a_padding_token_that_counts_as_a_target_is_seen(workspace, monkeypatch):
    subject = made(workspace)
    honest = batching.micro_batch

    def generous(given, ids, plan):
        micro = honest(given, ids, plan)
        mask = micro.mask_BT.copy()
        for row, i in enumerate(micro.ids):
            mask[row, given.lengths[i] : given.lengths[i] + 1] = True
        return replace(micro, mask_BT=mask, targets=int(mask.sum()))

    monkeypatch.setattr(batching, "micro_batch", generous)
    names = missed(gradients_of(subject, gradients.cuts))
    assert "whole, padded to 102" in names
    assert "mlx-lm's own loss, its padding target removed" not in names


def losing_gradient(function):
    """In place of mx.checkpoint: the right values, and no gradient for what goes in."""
    cut_off = lambda x: mx.stop_gradient(x) if isinstance(x, mx.array) else x
    return lambda *given: function(*tree_map(cut_off, given))


def test_a_wrong_memory_setting_is_switched_off_as_training_would(workspace, monkeypatch):
    subject = made(workspace)
    monkeypatch.setattr(mx, "checkpoint", losing_gradient)
    found = {x.what: x for x in gradients_of(subject, gradients.memory)}
    assert missed(found.values()) == []
    assert found["every trained layer recomputed"].passed is None
    assert "recomputation is off: on a real micro-batch" in found["every 2nd recomputed"].note
    assert found["loss in chunks of 16"].passed


def test_a_wrong_memory_setting_that_is_used_is_seen(workspace, monkeypatch):
    subject = made(workspace)
    monkeypatch.setattr(mx, "checkpoint", losing_gradient)
    monkeypatch.setattr(Step, "check", lambda self, micro, boundary=None: self.notes)
    names = missed(gradients_of(subject, gradients.memory))
    assert "every trained layer recomputed" in names
    assert "all of these together" in names
    assert "loss in chunks of 16" not in names


def test_a_resume_that_forgets_the_moments_is_seen(workspace, monkeypatch, capsys):
    subject = made(workspace)
    monkeypatch.setattr(optimizer, "restore", lambda *_: None)
    (found,) = runs.resume(subject, workspace / "runs")
    assert found.passed is False
    assert "adapters.safetensors, optimizer.safetensors" in found.note


def test_a_miss_ends_with_status_1_and_names_what(workspace, monkeypatch, capsys):
    proof_workspace.make(workspace)
    bad = finding.Finding("resume", "the second half", 0.25, 0.0)
    for module, name in ((gradients, "cuts"), (gradients, "memory"), (runs, "updates")):
        monkeypatch.setattr(module, name, lambda *_: iter(()))
    monkeypatch.setattr(runs, "resume", lambda *_: iter([bad]))
    assert prove.main([]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("error: 1 of 1 comparisons missed the second half")
    assert json.loads((workspace / "reports/prove.json").read_text())["ok"] is False


def test_dropout_is_off_where_it_would_differ_and_on_in_the_resume(workspace):
    subject = made(workspace, lora_parameters={"rank": 4, "dropout": 0.3})
    assert missed(gradients_of(subject, gradients.cuts)) == []
    assert gradients.dropout_of(subject.model) == pytest.approx(0.3)
    (found,) = runs.resume(subject, workspace / "runs")
    assert (found.measured, found.passed) == (0.0, True)


def test_mlx_lms_loss_is_given_the_targets_of_every_range_and_no_padding(workspace):
    mask = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]], bool)
    row, first, last = reference.target_ranges(mask)
    assert row.tolist() == [0, 0, 1]
    assert first.tolist() == [1, 4, 3]
    assert last.tolist() == [2, 4, 5]
    # The mean of float64 losses of single rows, by hand, and mlx-lm's own way on a padded row.
    subject = made(workspace)
    batch = reference.whole(subject.examples, 3)
    losses = []
    for i in range(3):
        tokens, targets = subject.examples.example(i)
        logits = np.array(subject.model(mx.array(tokens)[None])[0], np.float64)
        log_sum = np.log(np.exp(logits).sum(axis=1))
        every = log_sum[:-1] - logits[np.arange(len(tokens) - 1), tokens[1:]]
        losses += every[targets[1:]].tolist()
    found, _ = reference.by_mlx_lm(subject.model, batch)
    assert found == pytest.approx(np.mean(losses), rel=1e-6)
    short = mx.array(batch.tokens_BT[:1])
    counted = lambda last: default_loss(subject.model, short, mx.array([[1, last]]))[1].item()
    length = len(subject.examples.example(0)[0])
    assert (counted(length), counted(length - 1)) == (length, length - 1)


def test_examples_are_chosen_by_length_and_cut_around_their_targets():
    given = examples([10, 50, 20, 90])
    chosen = choice.choose(given, np.array([15, 40, 12]))
    # 40 takes the 50; 15 takes the 20; for 12 the shortest longer one left is the 90.
    assert chosen.row.tolist() == [2, 1, 3]
    assert chosen.lengths.tolist() == [15, 40, 12]
    assert chosen.tokens[:15].tolist() == list(range(60, 75))
    late = examples([60], first_target=50)
    window = choice.choose(late, np.array([20]))
    assert window.lengths.tolist() == [20]
    assert window.tokens.tolist() == list(range(40, 60))
    assert window.targets.tolist() == [10]
    again = choice.choose(given, np.array([10] * 6))
    assert sorted(again.row.tolist()) == [0, 0, 1, 2, 2, 3]
    with pytest.raises(UserError, match="nothing to prove"):
        choice.choose(examples([5], first_target=9), np.array([5]))


def test_the_whole_batch_stays_within_its_bound():
    assert choice.cap(rows=8, vocabulary=260) == 2048 // 8
    assert choice.cap(rows=8, vocabulary=49152) == int(200e6 / (4 * 49152) / 8)
    assert choice.cap(rows=8, vocabulary=10**6) == 48
    assert choice.lengths(5, 4, 160).tolist() == [20, 40, 80, 160, 20]
    assert choice.lengths(2, 1, 100).tolist() == [100, 100]


def test_distances_are_those_worked_out_by_hand():
    a = {"x": mx.array([3.0, 1.0]), "y": {"z": mx.array([0.0])}}
    b = {"x": mx.array([3.0, 4.0]), "y": {"z": mx.array([4.0])}}
    assert finding.distance(a, b) == pytest.approx(5 / 41**0.5)
    start = {"x": mx.array([3.0, 4.0]), "y.z": mx.array([2.0])}
    assert finding.distance(a, b, start) == pytest.approx(5 / 2)
    assert finding.distance(b, b) == 0.0
    assert finding.distance(a, b, dict(tree_flatten(b))) == float("inf")
    with pytest.raises(ValueError, match="other arrays"):
        finding.distance({"x": a["x"]}, b)


def test_what_is_not_a_number_never_passes():
    nan = finding.Finding("cuts", "a", float("nan"), 1.0)
    assert nan.passed is False
    assert nan.record()["measured"] == "nan"
    assert finding.Finding("cuts", "a", 0.5, 1.0, loss=2.0).passed is False
    assert finding.Finding("cuts", "a", None, 1.0).passed is None
    assert finding.Finding("cuts", "a", 1.0, 1.0, loss=1.0).passed is True


def test_the_run_is_left_as_it_was(workspace):
    subject = made(workspace, lora_parameters={"rank": 4, "dropout": 0.3})
    kinds = [type(x) for x in subject.model.layers]
    gradients_of(subject, gradients.cuts)
    list(runs.updates(subject, workspace / "runs"))
    now = dict(tree_flatten(subject.model.trainable_parameters()))
    assert all(mx.array_equal(now[name], x).item() for name, x in subject.start.items())
    assert [type(x) for x in subject.model.layers] == kinds
