"""`python -m stages convert`: configurations of mlx_lm.lora mean the same here."""

import json
import re
import shutil
import types
from pathlib import Path

import mlx.core as mx
import pytest
import yaml
from mlx_lm import lora as mlx_lora
from mlx_lm.tuner.utils import build_schedule
from omegaconf import OmegaConf

from stages.commands import convert
from stages.commands.converting import given
from stages.commands.converting import keys as lora_keys
from stages.compose import composition
from stages.core.config import schema, settings
from stages.core.model import models
from stages.core.update import adapters, schedule

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared/files"
FOLDERS = ("04-qwen3-macbook-zh-chat", "28-yaml-official-through-time")
FILES = sorted(SHARED.glob("*/*.yaml"))
COMMIT = "0123456789" * 4
SHORT = {"model": "m", "data": "data/source/toy"}

needs_files = pytest.mark.skipif(not FILES, reason="the shared files are not here")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A project's root with its real conf/, and an empty Hub cache; no waiting for the disk."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "data/source/toy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stages.core.files.sync", lambda path: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def converted(values, *words, status=0, name="mine"):
    """Convert a YAML file with these values; the composed settings of the experiment."""
    Path("mine.yaml").write_text(yaml.safe_dump({**SHORT, **values}))
    assert convert.main(["mine.yaml", "--name", name, *words]) == status
    return composed(name) if status == 0 else None


def composed(name):
    return settings.to_settings(composition.compose(Path("conf"), [f"experiment={name}"]))


def refused(capfd, values, *words):
    """The message of a conversion that is refused, with nothing written."""
    converted(values, *words, status=2)
    assert not Path("conf/experiment/mine.yaml").exists()
    return capfd.readouterr().err


def told(text, old):
    """The lines of the table that belong to an old key."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(old))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    return " ".join(" ".join(lines[start:end]).split())


# The files that people have


@needs_files
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_keys_of_real_files_are_known_or_old(file):
    expected = json.loads((file.parent / "expected.json").read_text())[file.name]["yaml"]
    keys = given.from_file(file)
    assert len(keys) == expected["keys"]
    assert sorted(set(keys) - set(lora_keys.KNOWN)) == sorted(expected["unknown"])
    assert set(expected["unknown"]) <= set(lora_keys.OLD)
    lora = set(keys.get("lora_parameters") or {}) - {"rank", "scale", "dropout", "keys"}
    assert sorted(lora) == sorted(expected["lora_unknown"])
    for path, (_, number, _) in expected["differs"].items():
        value = keys
        for part in path.split("."):
            value = value[int(part)] if part.isdigit() else value[part]
        assert (type(value), value) == (float, number)


@needs_files
@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.stem)
def test_official_files_through_time(file, capfd):
    words = ["--revision", COMMIT, "--data-revision", COMMIT, "--name", "mine"]
    assert convert.main([str(file), *words]) == 0
    found = composed("mine")
    train = found.train
    assert (train.fine_tune_type, train.num_layers, train.effective_batch_size) == ("lora", 16, 4)
    assert train.updates == (100 if "first" in file.stem else 1000)
    assert train.learning_rate == 1e-5
    assert isinstance(train.learning_rate, float)
    assert train.schedule.name == "constant"
    assert train.clip_norm is None
    lora = train.lora_parameters
    # The first of them has no lora_parameters, so that all linear layers get adapters.
    keys = None if "first" in file.stem else ["self_attn.q_proj", "self_attn.v_proj"]
    assert (lora.rank, lora.scale, lora.dropout, lora.keys) == (8, 20.0, 0.0, keys)
    newest = ("lora_config", "lora_config_2025-03")
    assert train.optimizer == ("adamw" if file.stem in newest else "adam")
    assert found.split.max_seq_length == 2048
    assert found.tokenize.train_on == "all"
    said = capfd.readouterr().err
    expected = json.loads((file.parent / "expected.json").read_text())[file.name]["yaml"]
    assert ("lora_layers is now num_layers" in said) == ("lora_layers" in expected["unknown"])
    assert ("adapter_file is now adapter_path" in said) == ("adapter_file" in expected["unknown"])
    if file.stem == "lora_config":
        assert found.model.repo == "mlx-community/Llama-3.2-1B-Instruct-bf16"
        assert found.model.revision == COMMIT
        assert found.data.path == f"hub:mlx-community/WikiSQL@{COMMIT}"
    else:
        assert (found.model.repo, found.model.path) == (None, "mlx_model")
        assert found.data.path == "data/source/data"
        assert "cp -r /path/to/training/data data/source/data" in said


@needs_files
def test_the_tutorials_file(capfd, tmp_path):
    file = SHARED / FOLDERS[0] / "ft_qwen3_lora.yaml"
    assert convert.main([str(file)]) == 0
    found = composed("ft_qwen3_lora")
    train = found.train
    assert (train.learning_rate, type(train.learning_rate)) == (1e-4, float)
    assert (train.schedule.name, train.schedule.end, train.updates) == ("cosine", 0.0, 500)
    assert (train.num_layers, train.effective_batch_size, train.updates_per_eval) == (28, 1, 50)
    assert (train.optimizer, found.split.max_seq_length) == ("adamw", 512)
    assert (found.evaluate.split, found.model.path) == ("valid", "Qwen3-0.6B")
    output = capfd.readouterr()
    assert "run.report_to=swanlab" in output.err
    assert "run.updates_per_save=100" in output.err
    assert "no test set is used" in output.err
    assert "memory" not in output.out
    assert str(tmp_path) not in Path("conf/experiment/ft_qwen3_lora.yaml").read_text()


@needs_files
def test_the_tutorials_rows_come_through_as_they_are(capfd):
    """No row of train is cut off for a test set that mlx-lm would not have."""
    from stages.collect.collect import collect

    file = SHARED / FOLDERS[0] / "ft_qwen3_lora.yaml"
    assert convert.main([str(file)]) == 0
    words = re.search(r"data: cp -r (\S+) (\S+) && dvc add (\S+)", capfd.readouterr().err)
    shutil.copytree(words[1], words[2])
    Path("raw").mkdir()
    report = collect(composed("ft_qwen3_lora").data, Path("raw"))
    rows = {split: report["splits"][split]["rows_out"] for split in ("train", "valid", "test")}
    assert rows == {"train": 87, "valid": 21, "test": 0}


# What mlx-lm knows


def test_our_defaults_are_those_of_mlx_lm():
    theirs = dict(mlx_lora.CONFIG_DEFAULTS)
    assert not any(theirs.pop("optimizer_config").values())
    assert {k: v for k, v in lora_keys.DEFAULTS.items() if k != "optimizer_config"} == theirs


def test_our_flags_are_those_of_mlx_lm():
    actions = mlx_lora.build_parser()._actions
    theirs = {action.dest: action.nargs == 0 for action in actions if action.dest != "help"}
    ours = {key for key in lora_keys.KNOWN if key not in lora_keys.FILE_ONLY}
    assert ours == set(theirs)
    switches = {key for key, is_switch in theirs.items() if is_switch}
    assert switches == set(lora_keys.SWITCHES) - set(lora_keys.OLD)


def test_flags_mean_what_mlx_lms_own_parser_makes_of_them():
    line = (
        "--model org/base --train --data rows --fine-tune-type dora --optimizer muon --mask-prompt"
        " --num-layers -1 --batch-size 2 --iters 60 --val-batches=-1 --learning-rate 2e-5"
        " --steps-per-eval 20 --grad-accumulation-steps 3 --max-seq-length 128 --grad-checkpoint"
        " --seed 7 --adapter-path out --steps-per-rep 5"
    )
    theirs = vars(mlx_lora.build_parser().parse_args(line.split()))
    ours = lora_keys.from_flags(["mlx_lm.lora", *line.split()])
    asked = {key: value for key, value in theirs.items() if value not in (None, 0, False)}
    assert ours == asked


def test_the_whole_command_as_flags(capfd):
    line = "python -m mlx_lm lora --model m --data data/source/toy --iters 30 --lora-layers 2"
    assert convert.main(["--name", "flags", "--", *line.split()]) == 0
    found = composed("flags")
    assert (found.train.updates, found.train.num_layers) == (30, 2)
    assert found.data.path == "data/source/toy"
    assert "lora_layers is now num_layers" in capfd.readouterr().err


def test_a_flag_wins_over_the_file():
    found = converted({"iters": 50, "batch_size": 2}, "--", "--iters", "70")
    assert (found.train.updates, found.train.effective_batch_size) == (70, 2)
    assert convert.main(["--name", "other", "--", "-c", "mine.yaml", "--seed", "3"]) == 0
    assert (composed("other").train.updates, composed("other").train.seed) == (50, 3)


# Translations


def test_accumulation_makes_the_effective_batch_and_the_updates(capfd):
    values = {"batch_size": 4, "grad_accumulation_steps": 8, "iters": 100, "steps_per_eval": 20}
    found = converted(values)
    train = found.train
    assert (train.effective_batch_size, train.updates, train.updates_per_eval) == (32, 12, 2)
    said = capfd.readouterr().err
    assert "100 iterations / 8 = 12 updates" in told(said, "iters")
    assert "mlx-lm never applies the gradient of the last 4" in told(said, "iters")
    assert "memory.batch_size=4" in said
    assert vars(found.memory) == vars(schema.Memory())


def test_a_run_without_an_update_is_refused(capfd):
    """G2: 3 micro-batches with accumulation 4."""
    said = refused(capfd, {"iters": 3, "grad_accumulation_steps": 4})
    assert "3 iterations, an update every 4" in said


def test_g4_warm_up_and_decay_written_in_iterations(capfd):
    """Warm-up 4, decay 16, 20 iterations, accumulation 4: the top rate comes at update 2 of 5."""
    arguments = {"name": "cosine_decay", "arguments": [1e-3, 16, 0], "warmup": 4}
    values = {"iters": 20, "grad_accumulation_steps": 4, "lr_schedule": arguments}
    train = converted(values).train
    assert (train.updates, train.stop_at_update, train.schedule.warmup) == (5, None, 1.0)
    rate = schedule.rates(train, train.updates)
    assert [rate(0), rate(1)] == pytest.approx([0, 1e-3])
    assert rate(4) == pytest.approx(0, abs=1e-12)
    assert "read as iterations, / 4 = updates" in told(capfd.readouterr().err, "lr_schedule")


@pytest.mark.parametrize(
    ("name", "arguments", "warmup", "exact"),
    [
        ("cosine_decay", [1e-3, 40], 0, False),
        ("cosine_decay", [1e-3, 30, 1e-5], 10, False),
        ("cosine_decay", [1e-3, 28, 1e-5], 10, True),
        ("linear_schedule", [1e-3, 1e-4, 39], 0, True),
        ("cosine_decay", [1e-3, 100, 1e-5], 10, True),
        ("linear_schedule", [1e-3, 0.0, 60], 0, True),
        ("cosine_decay", [1e-3, 20], 0, True),
    ],
)
def test_rates_are_those_of_mlx_lm(name, arguments, warmup, exact):
    iters = 40
    lr_schedule = {"name": name, "arguments": arguments, "warmup": warmup}
    train = converted({"iters": iters, "lr_schedule": lr_schedule}).train
    theirs, ours = build_schedule(lr_schedule), schedule.rates(train, train.updates)
    last = min(train.updates, train.stop_at_update or train.updates)
    # Exact, but where a decay over all iterations ends with the run instead of just after it.
    near = 1e-6 if exact else 4 / iters
    found = [ours(done) / arguments[0] for done in range(last)]
    wanted = [theirs(mx.array(done)).item() / arguments[0] for done in range(last)]
    assert found == pytest.approx(wanted, abs=near)
    assert all(theirs(mx.array(done)).item() == 0 for done in range(last, iters))


def test_a_decay_longer_than_the_run_keeps_its_length(capfd):
    arguments = {"name": "cosine_decay", "warmup": 100, "arguments": [1e-5, 1000, 1e-7]}
    train = converted({"iters": 1000, "lr_schedule": arguments}).train
    assert (train.updates, train.stop_at_update) == (1102, 1000)
    assert "decay ends at update 1102, the run at 1000" in capfd.readouterr().err


def test_a_short_decay_with_an_end_is_said_to_differ(capfd):
    arguments = {"name": "linear_schedule", "arguments": [1e-3, 1e-4, 10], "warmup_init": 1e-7}
    train = converted({"iters": 100, "lr_schedule": arguments, "learning_rate": 3.0}).train
    assert (train.updates, train.learning_rate, train.schedule.end) == (100, 1e-3, 1e-4)
    said = told(capfd.readouterr().err, "lr_schedule")
    assert "NOT THE SAME: mlx-lm stays at 0.0001 from update 11 on" in said
    assert "learning_rate is ignored by mlx-lm" in said


def test_a_warm_up_that_starts_above_0_is_said(capfd):
    arguments = {"name": "cosine_decay", "arguments": [1, 18], "warmup": 1, "warmup_init": 1e-7}
    converted({"iters": 20, "lr_schedule": arguments})
    assert "the warm-up starts at 0, not at 1e-07" in capfd.readouterr().err


def test_other_schedules_are_refused(capfd):
    arguments = {"name": "exponential_decay", "arguments": [0.1, 0.9]}
    said = refused(capfd, {"lr_schedule": arguments})
    assert "exponential_decay" in said
    assert "cosine_decay, linear_schedule" in said


@pytest.mark.parametrize(
    ("given_lora", "scale", "said"),
    [
        ({"rank": 8, "alpha": 16, "scale": 10, "dropout": 0}, 20, "ignores alpha and takes 10"),
        ({"rank": 8, "alpha": 16, "dropout": 0}, 2, "stops at alpha without scale"),
        ({"rank": 8, "scale": 3, "dropout": 0}, 3, ""),
        ({"rank": 4}, 20, "mlx-lm stops without it; its default is taken"),
    ],
)
def test_alpha_beside_scale_and_alone(given_lora, scale, said, capfd):
    train = converted({"lora_parameters": given_lora}).train
    assert train.lora_parameters.scale == scale
    assert train.lora_parameters.rank == given_lora["rank"]
    assert said in capfd.readouterr().err


def test_use_dora_is_a_fine_tune_type(capfd):
    assert converted({"use_dora": True}).train.fine_tune_type == "dora"
    assert "use_dora is now fine_tune_type; mlx-lm 0.32.2 ignores it" in capfd.readouterr().err
    assert converted({"use_dora": False}, name="other").train.fine_tune_type == "lora"


def test_an_old_and_a_new_name_that_differ_are_refused(capfd):
    said = refused(capfd, {"lora_layers": 4, "num_layers": 8})
    assert "lora_layers is the old name of num_layers" in said
    assert converted({"lora_layers": 8, "num_layers": 8}).train.num_layers == 8


@pytest.mark.parametrize("layers", [-1, 0, -3])
def test_all_layers(layers):
    """In mlx-lm `layers[-max(n, 0):]` is every layer for n below 1."""
    assert converted({"num_layers": layers}).train.num_layers == -1


def test_prompt_masking():
    """mlx-lm masks all but the last answer of a chat."""
    assert converted({"mask_prompt": True}).tokenize.train_on == "last_assistant"
    assert converted({"mask_prompt": False}, name="other").tokenize.train_on == "all"


def test_full_fine_tuning_and_optimizer_settings(capfd):
    config = {"adamw": {"betas": [0.9, 0.98], "weight_decay": 0.05}, "sgd": {"momentum": 0.9}}
    values = {"fine_tune_type": "full", "optimizer": "AdamW", "optimizer_config": config}
    train = converted(values).train
    assert (train.fine_tune_type, train.optimizer) == ("full", "adamw")
    assert train.optimizer_config == {"adamw": {"betas": [0.9, 0.98], "weight_decay": 0.05}}
    assert "mlx-lm ignores those of sgd" in capfd.readouterr().err


def test_names_of_features_become_columns():
    values = {"prompt_feature": "my question", "completion_feature": "reply", "chat_feature": "m"}
    found = converted(values)
    expected = {"prompt": "my question", "completion": "reply", "messages": "m"}
    assert found.data.columns == expected


def test_a_hub_data_set_with_features(capfd):
    values = {"path": "org/rows", "prompt_feature": "text", "completion_feature": "summary"}
    found = converted({"hf_dataset": values}, "--data-revision", COMMIT)
    assert found.data.path == f"hub:org/rows@{COMMIT}"
    assert found.data.columns == {"prompt": "text", "completion": "summary"}
    sliced = {"hf_dataset": {**values, "train_split": "train[:1000]"}}
    Path("conf/experiment/mine.yaml").unlink()
    assert "train_split: train[:1000]" in refused(capfd, sliced)


def test_what_mlx_lm_ignores_is_named(capfd):
    values = {"clear_cache_threshold": "2GB", "trust_remote_code": True, "train": False}
    found = converted({**values, "grad_checkpoint": True})
    said = capfd.readouterr().err
    assert "mlx-lm 0.32.2 ignores it in a file" in told(said, "clear_cache_threshold")
    assert "memory.cache_limit_gb=2.0" in told(said, "clear_cache_threshold")
    assert "mlx-lm 0.32.2 ignores it in a file" in told(said, "trust_remote_code")
    assert "only tests" in told(said, "train: false")
    assert "memory.grad_checkpoint=true" in said
    assert vars(found.memory) == vars(schema.Memory())


def test_mlx_lm_really_ignores_these_in_a_file():
    """Its command-line defaults are not None, and only None lets the file speak."""
    defaults = vars(mlx_lora.build_parser().parse_args([]))
    ignored = {key for key, value in defaults.items() if value is not None}
    assert ignored == {"clear_cache_threshold", "trust_remote_code"}


def test_a_null_means_the_default():
    train = converted({"iters": None, "optimizer": None, "learning_rate": None}).train
    assert (train.updates, train.optimizer, train.learning_rate) == (1000, "adam", 1e-5)


# Places


def test_a_hub_model_takes_its_commit_from_this_machines_cache(capfd, tmp_path):
    refs = tmp_path / "hub/models--org--base/refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    found = converted({"model": "org/base"})
    assert (found.model.repo, found.model.revision) == ("org/base", COMMIT)
    assert "this machine's Hub cache" in capfd.readouterr().err


def test_a_hub_model_without_a_commit_is_written_and_says_what_is_left(capfd):
    Path("mine.yaml").write_text(yaml.safe_dump({**SHORT, "model": "org/base"}))
    assert convert.main(["mine.yaml"]) == 0
    assert "huggingface.co/org/base/commits" in capfd.readouterr().err
    written = OmegaConf.load("conf/experiment/mine.yaml")
    assert written.model == {"repo": "org/base", "revision": None, "path": None, "dtype": "stored"}
    words = ["experiment=mine", f"model.revision={COMMIT}"]
    assert composition.compose(Path("conf"), words).model.repo == "org/base"


def test_folders_beside_the_file_are_found(capfd):
    """mlx-lm is run where its file lies; the experiment names paths from the project's root."""
    for folder in ("../theirs/base", "../theirs/rows"):
        Path(folder).mkdir(parents=True)
    Path("../theirs/rows/train.jsonl").write_text("{}\n")
    Path("../theirs/x.yaml").write_text("model: base\ndata: rows\niters: 5\n")
    assert convert.main(["../theirs/x.yaml"]) == 0
    found = composed("x")
    assert found.model.path == "../theirs/base"
    assert found.data.path == "data/source/rows"
    assert vars(found.data.shares) == {"train": 0.9, "valid": 0.1, "test": 0.0}
    said = capfd.readouterr().err
    assert "cp -r ../theirs/rows data/source/rows" in said
    assert "there is no valid.jsonl" in said


@pytest.mark.parametrize(
    ("names", "test", "split"),
    [(("train", "valid"), False, "valid"), (("train", "valid", "test"), False, "test")],
)
def test_the_split_that_is_evaluated(names, test, split):
    for name in names:
        Path(f"data/source/toy/{name}.jsonl").write_text("{}\n")
    found = converted({"test": test})
    assert found.evaluate.split == split
    assert vars(found.data.shares) == {"train": 1.0, "valid": 0.0, "test": 0.0}


def test_an_adapter_of_mlx_lm_is_where_the_run_starts(tmp_path):
    """The folder is written by `mlx_lm.lora.train_model` itself."""
    tiny = schema.Model(repo="builtin:tiny", dtype="float32")
    place = models.folder(models.build_manifest(tiny), tiny)
    values = {**mlx_lora.CONFIG_DEFAULTS, "num_layers": 2, "adapter_path": str(tmp_path / "theirs")}
    values |= {"iters": 1, "batch_size": 1, "learning_rate": 0.1, "model": str(place)}
    model, _ = models.load_model(place)
    mlx_lora.train_model(types.SimpleNamespace(**values), model, TwoRows(), [], None)
    moved = adapters.trained(model)

    chosen = {"num_layers": 2, "resume_adapter_file": "theirs/adapters.safetensors"}
    train = converted(chosen).train
    assert train.initial_adapters == "theirs"
    ours, _ = models.load_model(place)
    adapters.attach(ours, train)
    adapters.load(Path(train.initial_adapters), ours)
    loaded = adapters.trained(ours)
    assert loaded.keys() == moved.keys()
    assert all(mx.array_equal(loaded[name], moved[name]).item() for name in moved)


class TwoRows:
    """A data set as mlx-lm's trainer wants it."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [1, 2, 3, 4 + index]

    def process(self, row):
        return row, 0


def test_a_numbered_checkpoint_as_start_says_what_to_do(capfd):
    found = converted({"resume_adapter_file": "out/0000100_adapters.safetensors"})
    assert found.train.initial_adapters == "out"
    assert "put 0000100_adapters.safetensors as adapters.safetensors" in capfd.readouterr().err


# Refusals, and what is written


def test_unknown_keys_are_refused_with_the_nearest(capfd):
    said = refused(capfd, {"learning_rte": 1e-5, "batchsize": 4, "zzz": 1})
    assert "learning_rte (nearest: learning_rate)" in said
    assert "batchsize (nearest: batch_size)" in said
    assert "zzz" in said
    said = refused(capfd, {"lora_parameters": {"rank": 8, "scal": 20.0, "dropout": 0.0}})
    assert "lora_parameters.scal (nearest: lora_parameters.scale)" in said
    said = refused(capfd, {"lr_schedule": {"nam": "cosine_decay"}})
    assert "lr_schedule.nam (nearest: lr_schedule.name)" in said


@pytest.mark.parametrize(
    "values",
    [
        {"iters": "many"},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"grad_accumulation_steps": 0},
        {"learning_rate": "fast"},
        {"learning_rate": -1.0},
        {"num_layers": "all"},
        {"mask_prompt": "yes"},
        {"fine_tune_type": "qlora"},
        {"optimizer": "lion"},
        {"lora_parameters": [8]},
        {"lora_parameters": {"rank": 0, "scale": 1.0, "dropout": 0.0}},
        {"lora_parameters": {"rank": 8, "scale": 1.0, "dropout": 0.0, "keys": "q_proj"}},
        {"lr_schedule": {"name": "cosine_decay", "arguments": [1e-5]}},
        {"lr_schedule": {"name": "cosine_decay", "arguments": ["a", 10]}},
        {"lr_schedule": {"name": "linear_schedule", "arguments": [1e-5, 0.0, 0.5]}},
        {"max_seq_length": 1},
        {"model": 7},
        {"hf_dataset": [{"path": "a/b"}, {"path": "c/d"}]},
    ],
    ids=str,
)
def test_values_that_cannot_be_used_are_refused(capfd, values):
    said = refused(capfd, values)
    assert next(iter(values)).split(".")[0] in said
    assert "Traceback" not in said


def test_no_yaml_no_file_and_nothing(capfd):
    Path("bad.yaml").write_text("a: [1\n")
    assert convert.main(["bad.yaml"]) == 2
    assert convert.main(["absent.yaml"]) == 2
    assert "absent.yaml" in capfd.readouterr().err
    assert convert.main([]) == 2
    assert "convert FILE" in capfd.readouterr().err
    for words in (["--itrs", "5"], ["--iters"], ["--iters", "--seed"]):
        assert convert.main(["--", *words]) == 2
        assert "--it" in capfd.readouterr().err


TEN = "[" + ",".join(["x"] * 10) + "]"
ODD = {
    "tabs": ("model: a/b\n\tbatch_size: 4\n", "odd.yaml:2:1"),
    "a key twice": ("model: a/b\niters: 10\niters: 20\n", "odd.yaml:3:1"),
    "two documents": ("model: a/b\n---\nmodel: c/d\n", "odd.yaml:2:1"),
    "only a word": ("model\n", "key: value"),
    "another word": ("some text\n", "some text"),
    "an unknown key without a value": ("model: a/b\nitrs:\n", "itrs (nearest: iters)"),
    "a list": ("- model: a/b\n", "holds no keys"),
    "nothing": ("", "no key"),
    "a comment": ("# model: a/b\n", "no key"),
    "a number in quotes": ('model: a/b\niters: "100"\n', '"100", which is text'),
    "a list for a number": ("model: a/b\niters: [100]\n", "[100]"),
    "a list for a word": ("model: [a, b]\n", "['a', 'b']"),
    "keys for a number": ("model: a/b\nlearning_rate: {a: 1}\n", "{'a': 1}"),
    "not a number": ("model: a/b\nlearning_rate: .nan\n", "correct odd.yaml"),
    "a seed too large": (f"model: a/b\nseed: {2**80}\n", "correct odd.yaml"),
    "a variable": ("model: ${oc.env:HOME}/model\n", "odd.yaml: model"),
    "a variable below": ("lora_parameters: {keys: ['${x}']}\n", "lora_parameters.keys"),
    "code": ("model: !!python/object/apply:os.getcwd []\n", "odd.yaml:1:8"),
    "aliases of aliases": (
        f"a: &a {TEN}\n"
        + "".join(
            f"{n}: &{n} [{','.join([f'*{m}'] * 10)}]\n" for m, n in zip("abcdefgh", "bcdefghi")
        ),
        "more than 10000 values",
    ),
}


@pytest.mark.parametrize("odd", list(ODD))
def test_odd_files_are_refused_with_the_place(capfd, odd):
    text, words = ODD[odd]
    Path("odd.yaml").write_text(text)
    assert convert.main(["odd.yaml"]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not Path("conf/experiment/odd.yaml").exists()


@pytest.mark.parametrize("content", [b"\xff\xfem\x00", bytes(range(256))], ids=["utf-16", "bytes"])
def test_other_bytes_are_refused(capfd, content):
    Path("odd.yaml").write_bytes(content)
    assert convert.main(["odd.yaml"]) == 2
    assert "odd.yaml" in capfd.readouterr().err


def test_a_byte_order_mark_anchors_and_json_are_fine():
    words = "\ufefflora_parameters: &it\r\n  <<: {rank: 4}\r\n  scale: 20.0\r\nmodel: m\r\n"
    Path("odd.yaml").write_bytes(words.encode())
    assert convert.main(["odd.yaml"]) == 0
    assert composed("odd").train.lora_parameters.rank == 4
    Path("mine.json").write_text(json.dumps({**SHORT, "iters": 7}))
    assert convert.main(["mine.json"]) == 0
    assert composed("mine").train.updates == 7


def test_a_folder_that_mlx_lm_trained_into_says_how(capfd):
    """mlx-lm writes all its arguments beside the adapter."""
    folder = Path("theirs/adapters")
    folder.mkdir(parents=True)
    assert convert.main(["theirs/adapters"]) == 2
    assert "theirs/adapters" in capfd.readouterr().err
    said = {**mlx_lora.CONFIG_DEFAULTS, **SHORT, "train": True, "iters": 30, "batch_size": 2}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    assert convert.main(["theirs/adapters", "--name", "theirs"]) == 0
    found = composed("theirs")
    assert (found.train.updates, found.train.effective_batch_size) == (30, 2)
    assert found.train.num_layers == mlx_lora.CONFIG_DEFAULTS["num_layers"]


def test_an_experiment_is_never_overwritten(capfd):
    converted({})
    before = Path("conf/experiment/mine.yaml").read_text()
    converted({"iters": 5}, status=2)
    assert "--name NAME" in capfd.readouterr().err
    assert Path("conf/experiment/mine.yaml").read_text() == before


def test_the_overrides_compose_to_the_same_as_the_experiment(capfd):
    config = {"adamw": {"weight_decay": 0.05}}
    values = {"optimizer": "adamw", "optimizer_config": config, "prompt_feature": "it's a, b"}
    found = converted({**values, "lora_parameters": {"rank": 2, "scale": 1, "dropout": 0.1}})
    overrides = capfd.readouterr().out.splitlines()
    assert settings.to_settings(composition.compose(Path("conf"), overrides)) == found


def test_every_value_stands_in_the_table(capfd):
    converted({})
    output = capfd.readouterr()
    for override in output.out.splitlines():
        group = override.split("=")[0] in ("model", "data", "train")
        assert group or f" {override}\n" in output.err
