"""An adapter in PEFT's form: adapter_config.json and adapter_model.safetensors.

Form: https://huggingface.co/docs/peft/developer_guides/checkpoint. With rank r,

    mlx-lm  y = W x + scale · (x A) B             A (in, r), B (r, out)
    PEFT    y = W x + (lora_alpha / r) · B A x    A (r, in), B (out, r)

so both are transposed, and lora_alpha = scale · r. DoRA's magnitude is the same vector in both.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from stages.commands.exporting import rows
from stages.commands.exporting.rows import Seen
from stages.commands.exporting.subject import Subject
from stages.core import files
from stages.core.errors import UserError, listed
from stages.core.model import tensors
from stages.core.update import adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


def write(subject: Subject, folder: Path) -> None:
    """Write both files into an empty folder.

    Raises:
        UserError: PEFT has no form for what was trained.
    """
    model, _ = subject.load()
    adapters.load(subject.adapters, model)
    wrapped = _wrapped(subject, model)
    arrays: dict[str, mx.array] = {}
    for name, module in wrapped.items():
        arrays[PREFIX + name + A] = mx.contiguous(module.lora_a.T)
        arrays[PREFIX + name + B] = mx.contiguous(module.lora_b.T)
        if isinstance(module, DoRALinear):
            arrays[PREFIX + name + M] = module.m
    tensors.write(folder / WEIGHTS, arrays)
    files.write_json(folder / CONFIG, config(subject, sorted(wrapped)))


def config(subject: Subject, modules: list[str]) -> dict[str, Any]:
    """A `peft.LoraConfig`; module paths are whole, so that they match no other module."""
    lora = subject.config["lora_parameters"]
    source = subject.manifest.source
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.repo if source.kind == "hub" else subject.manifest.name,
        "revision": source.revision if source.kind == "hub" else None,
        "r": lora["rank"],
        "lora_alpha": lora["scale"] * lora["rank"],
        "lora_dropout": lora["dropout"],
        "target_modules": modules,
        "use_dora": subject.config["fine_tune_type"] == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def see_by_formula(subject: Subject, folder: Path) -> Seen:
    """What the written files say by PEFT's formula, computed from the files alone, in MLX."""
    written = mx.load(str(folder / WEIGHTS))
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    scaling = settings["lora_alpha"] / settings["r"]
    model, _ = subject.load()
    modules = dict(model.named_modules())
    replaced = []
    for name in settings["target_modules"]:
        old = modules[name]
        weight = _weight(old).astype(mx.float32)
        weight = weight + scaling * (written[PREFIX + name + B] @ written[PREFIX + name + A])
        if settings["use_dora"]:
            norm = mx.linalg.norm(weight, axis=1)
            weight = (written[PREFIX + name + M] / norm)[:, None] * weight
        new = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in old)
        new.weight = weight
        if "bias" in old:
            new.bias = old.bias
        replaced.append((name, new))
    model.update_modules(tree_unflatten(replaced))
    return subject.see(model)


def installed() -> bool:
    """Whether PEFT and PyTorch are in this environment."""
    return all(importlib.util.find_spec(name) for name in ("peft", "torch"))


def torch_base(subject: Subject) -> Any:
    """The base model as transformers loads it, in float32.

    Raises:
        Exception: Whatever transformers raises for a folder that it cannot load.
    """
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        subject.folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()


def see_by_peft(subject: Subject, folder: Path, base: Any) -> tuple[Seen, Seen]:
    """What PyTorch says about the rows: the base alone, and with the adapter as PEFT loads it."""
    import torch
    from peft import PeftModel

    def forward(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(tokens[None], dtype=torch.long)).logits[0].numpy()

    model = base
    alone = rows.observe(forward, subject.rows)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    return alone, rows.observe(forward, subject.rows)


def _wrapped(subject: Subject, model: nn.Module) -> dict[str, nn.Module]:
    """Module path → its adapter layer.

    Raises:
        UserError: Whole layers were trained, or modules that PEFT's LoRA names or shapes otherwise.
    """
    refused = "PEFT has no form for this adapter"
    fix = "export the fused model (--fused FOLDER) or the adapter as mlx-lm has it (--adapter)"
    if subject.config["fine_tune_type"] == "full":
        raise UserError(refused, where=str(subject.adapters), found="whole layers (full)", fix=fix)
    found = {name: module for name, module in model.named_modules() if "lora_a" in module}
    strange = {type(module).__name__ for module in found.values() if not _is_linear(module)}
    if strange:
        raise UserError(
            refused,
            where="train.lora_parameters.keys",
            found=", ".join(sorted(strange)),
            expected="adapters of linear layers only (LoRALinear, DoRALinear)",
            fix=fix,
        )
    named = _names_in_files(subject.folder)
    unknown = sorted(name for name in found if f"{name}.weight" not in named)
    if unknown:
        raise UserError(
            "The model's files call these modules otherwise, so PEFT would not find them",
            where=subject.folder.name,
            found=listed(unknown),
            fix=fix,
        )
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (LoRALinear, DoRALinear)


def _names_in_files(folder: Path) -> set[str]:
    """Names of all arrays of a model folder; nothing but the files' headers is read."""
    return {name for file in folder.glob("model*.safetensors") for name in mx.load(str(file))}


def _weight(module: nn.Module) -> mx.array:
    if not isinstance(module, nn.QuantizedLinear):
        return module.weight
    return mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
