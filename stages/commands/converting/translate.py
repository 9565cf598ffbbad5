"""Every key of a configuration of `mlx_lm.lora`, in the words of this project.

What the configuration leaves out has mlx-lm's default, and is written down too, so that the
experiment means the same whatever conf/ says besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.commands.converting import lora, places, rate
from stages.commands.converting.conversion import Conversion
from stages.commands.converting.given import Given, wrong
from stages.commands.converting.keys import DEFAULTS, VERSION
from stages.core.config.checks import CHOICES
from stages.core.config.settings import nearest
from stages.core.errors import UserError


def translate(
    given: Given, revision: str | None = None, data_revision: str | None = None
) -> Conversion:
    """Convert a whole configuration.

    Args:
        revision, data_revision: Commits of a Hub model and of a Hub data set.

    Raises:
        UserError: A value cannot be used, or means something that this project has no word for.
    """
    found = Conversion()
    places.model(given, found, revision)
    places.data(given, found, data_revision)
    _targets(given, found)
    _method(given, found)
    _optimizer(given, found)
    _updates(given, found)
    _machine(given, found)
    _without_counterpart(given, found)
    return found


def _targets(given: Given, found: Conversion) -> None:
    if given.switch("mask_prompt"):
        found.add(
            given.told("mask_prompt"),
            {"tokenize.train_on": "last_assistant"},
            "as mlx-lm: the last answer of a chat; `assistant` trains every answer",
        )
    else:
        found.add(
            given.told("mask_prompt"),
            {"tokenize.train_on": "all"},
            "as mlx-lm: prompts are trained too; `assistant` trains the answers only",
        )
    cap = given.count("max_seq_length", least=2)
    found.add(
        given.told("max_seq_length"),
        {"split.max_seq_length": cap, "split.policy": "split"},
        "mlx-lm throws away what is longer; here it is cut into pieces and trained"
        " (split.policy=truncate_end does as mlx-lm)",
    )


def _method(given: Given, found: Conversion) -> None:
    kind = _choice(given, "fine_tune_type", CHOICES["train.fine_tune_type"])
    found.groups["train"] = "full" if kind == "full" else "lora"
    notes = [_forgotten(given, "fine_tune_type", "trains LoRA")]
    found.add(given.told("fine_tune_type"), {"train.fine_tune_type": kind}, *notes)
    layers = given["num_layers"]
    if isinstance(layers, bool) or not isinstance(layers, int):
        raise wrong(given.old.get("num_layers", "num_layers"), layers, "a whole number, -1: all")
    notes = [_forgotten(given, "num_layers", f"trains {DEFAULTS['num_layers']} layers")]
    if layers < 1:
        notes.append("all layers")
    new = {"train.num_layers": layers if layers > 0 else -1}
    found.add(given.told("num_layers"), new, *notes)
    lora.convert(given, found, kind)
    _initial(given, found)


def _forgotten(given: Given, key: str, instead: str) -> str:
    """A note for a key given by a name that mlx-lm no longer knows."""
    name = given.old.get(key)
    return f"{name} is now {key}; mlx-lm {VERSION} ignores it and {instead}" if name else ""


def _initial(given: Given, found: Conversion) -> None:
    if not given.said("resume_adapter_file"):
        found.add(given.told("resume_adapter_file"), {"train.initial_adapters": None})
        return
    file = Path(given.text("resume_adapter_file"))
    here = places.locate(str(file), given.file)
    folder = places.from_root(here.parent, str(file.parent)) if here else file.parent.as_posix()
    found.add(
        given.told("resume_adapter_file"),
        {"train.initial_adapters": folder},
        "weights only, in mlx-lm too: the optimizer starts anew",
    )
    if file.name != "adapters.safetensors":
        found.todo.append(
            f"train.initial_adapters: put {file.name} as adapters.safetensors into a folder with"
            " its adapter_config.json, and name that folder"
        )


def _optimizer(given: Given, found: Conversion) -> None:
    name = _choice(given, "optimizer", CHOICES["train.optimizer"])
    new = {"train.optimizer": name}
    found.add(
        given.told("optimizer"), new, "adam, not adamw" if not given.said("optimizer") else ""
    )
    config = given.group("optimizer_config")
    mine = config.get(name) or {}
    others = sorted(key for key, value in config.items() if value and key != name)
    note = f"mlx-lm ignores those of {', '.join(others)} beside {name}" if others else ""
    new = {"train.optimizer_config": {name: mine} if mine else {}}
    found.add(given.told("optimizer_config"), new, note)
    new = {"train.clip_norm": None, "train.patience": None, "train.epochs": None}
    found.add("(no key)", new, "mlx-lm neither clips, nor stops early, nor counts passes")
    found.add(given.told("seed"), {"train.seed": given.count("seed", least=0)})


def _choice(given: Given, key: str, allowed: tuple[str, ...]) -> str:
    value = str(given[key]).lower()
    if value not in allowed:
        close = nearest(value, allowed)
        raise UserError(
            f"{key} cannot be used",
            where=key,
            found=given[key],
            expected=", ".join(allowed),
            fix=f"nearest: {close}" if close else "",
        )
    return value


def _updates(given: Given, found: Conversion) -> None:
    rows, steps = given.count("batch_size"), given.count("grad_accumulation_steps")
    iterations = given.count("iters")
    updates, rest = divmod(iterations, steps)
    if updates == 0:
        raise UserError(
            "These iterations make no update: mlx-lm would train nothing, without a word",
            where="iters, grad_accumulation_steps",
            found=f"{iterations} iterations, an update every {steps}",
            expected=f"at least {steps} iterations",
            fix="raise iters, or lower grad_accumulation_steps",
        )
    found.add(
        given.told("batch_size", "grad_accumulation_steps"),
        {"train.effective_batch_size": rows * steps},
        f"{rows} × {steps}: the examples of one update" if steps > 1 else "",
    )
    wanted = rate.convert(given, steps, updates)
    notes = [f"{iterations} iterations / {steps} = {updates} updates"] if steps > 1 else []
    if rest:
        notes.append(f"mlx-lm never applies the gradient of the last {rest}")
    new = {"train.updates": wanted.updates, "train.stop_at_update": wanted.stop}
    found.add(given.told("iters"), new, *notes)
    _rate(given, found, wanted)
    every = max(1, round(given.count("steps_per_eval") / steps))
    found.add(given.told("steps_per_eval"), {"train.updates_per_eval": every}, _per(steps))


def _rate(given: Given, found: Conversion, wanted: rate.Rate) -> None:
    new = {
        "train.learning_rate": wanted.top,
        "train.schedule.name": wanted.name,
        "train.schedule.warmup": float(wanted.warmup),
        "train.schedule.end": wanted.end,
    }
    key = "lr_schedule" if given.said("lr_schedule") else "learning_rate"
    found.add(given.told(key), new, *wanted.notes)


def _per(steps: int) -> str:
    return f"iterations / {steps}, rounded" if steps > 1 else ""


def _machine(given: Given, found: Conversion) -> None:
    """What mlx-lm ran with: a hint for local.yaml, never part of an experiment."""
    memory = {"memory.batch_size": given.count("batch_size")}
    if given.switch("grad_checkpoint"):
        memory["memory.grad_checkpoint"] = True
    found.add(given.told("batch_size", "grad_checkpoint"), memory, "auto measures what fits")
    if given.said("clear_cache_threshold"):
        size = _gigabytes(given["clear_cache_threshold"])
        file = "clear_cache_threshold" in given.from_file
        note = (
            f"mlx-lm {VERSION} ignores it in a file"
            if file
            else f"mlx-lm {VERSION} never hands it to its trainer"
        )
        found.add(given.told("clear_cache_threshold"), {"memory.cache_limit_gb": size}, note)
    steps = given.count("grad_accumulation_steps")
    if given.said("save_every"):
        every = max(1, round(given.count("save_every") / steps))
        found.add(given.told("save_every"), {"run.updates_per_save": every}, _per(steps))
    if given.said("report_to"):
        found.add(given.told("report_to"), {"run.report_to": given.text("report_to")})


def _gigabytes(value: Any) -> float:
    """mlx-lm's sizes: bytes, or a number with M, MB, G or GB."""
    text = str(value).strip().upper()
    for ending, factor in (("GB", 1.0), ("MB", 1e-3), ("G", 1.0), ("M", 1e-3), ("", 1e-9)):
        number = text.removesuffix(ending)
        if text.endswith(ending) and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise wrong("clear_cache_threshold", value, "bytes, or a size such as 2GB")


def _without_counterpart(given: Given, found: Conversion) -> None:
    """Keys that say how mlx-lm works, or that samestep does by itself."""
    where = {
        "train": "dvc repro trains",
        "val_batches": "always the whole valid set",
        "test_batches": "always the whole test set",
        "steps_per_report": "every update is recorded",
        "adapter_path": "always adapters/; `python -m stages export --adapter FOLDER` copies it",
        "project_name": "the name of the project's folder",
        "trust_remote_code": "code of a model is never run",
    }
    for key, words in where.items():
        if not given.said(key):
            continue
        notes = [_forgotten(given, key, f"writes to {DEFAULTS['adapter_path']}/")]
        if key == "train" and not given.switch("train"):
            notes.append("this file only tests; the pipeline trains first")
        if key == "trust_remote_code" and key in given.from_file:
            notes.append(f"mlx-lm {VERSION} ignores it in a file")
        found.drop(given.told(key), words, *notes)
