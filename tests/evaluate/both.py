"""Base and tuned losses by other roads: mlx-lm's own loader, and a Llama in float64 NumPy."""

import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from stages.core.memory.plan import Plan
from stages.core.update.batching import MicroBatch
from tests.core.small_models import VOCABULARY, build

PLAN = Plan(batch_size=4, batch_tokens=4096, widths=(16, 32), loss_chunk=7)
LORA = {"rank": 4, "scale": 10.0, "dropout": 0.0}


def micro(lengths=(9, 21, 14), width=24, seed=0, first_id=0) -> MicroBatch:
    """Random tokens; the first third of each row is prompt."""
    rng = np.random.default_rng(seed)
    tokens_BT = np.zeros((len(lengths), width), np.int32)
    mask_BT = np.zeros((len(lengths), width), bool)
    for row, length in enumerate(lengths):
        tokens_BT[row, :length] = rng.integers(1, VOCABULARY, length)
        mask_BT[row, max(1, length // 3) : length] = True
    ids = np.arange(first_id, first_id + len(lengths))
    return MicroBatch(ids, tokens_BT, mask_BT, int(mask_BT.sum()), int(sum(lengths)))


def write_adapters(folder, name, kind="lora", layers=2, keys=None, noise=0.05, seed=3):
    """A folder as mlx-lm writes it, with trained values away from where they start."""
    model = build(name)
    model.freeze()
    lora = {**LORA, "keys": keys} if keys else LORA
    if kind == "full":
        for layer in model.layers[-layers:]:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, layers, lora, use_dora=kind == "dora")
    mx.random.seed(seed)
    values = {
        path: value + noise * mx.random.normal(value.shape)
        for path, value in tree_flatten(model.trainable_parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), values)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def separate(name, folder, batch):
    """Losses (M,) of a plain base model and of a second model that mlx-lm gave the adapters."""
    tuned = load_adapters(build(name), str(folder))
    return all_logits(build(name), batch), all_logits(tuned, batch)


def all_logits(model, batch):
    """Losses (M,) and hits (M,) from all logits of the model's own call, in float64."""
    model.eval()
    logits = np.array(model(mx.array(batch.tokens_BT)).astype(mx.float32), np.float64)
    return from_logits(logits, batch)


def from_logits(logits_BTV, batch):
    row, position = np.nonzero(batch.mask_BT)
    logits = logits_BTV[row, position - 1]
    label = batch.tokens_BT[row, position]
    top = logits.max(axis=1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return total - logits[np.arange(len(label)), label], logits.argmax(axis=1) == label


def float64(model):
    """Flat name → weight."""
    return {name: np.array(value, np.float64) for name, value in tree_flatten(model.parameters())}


def fused(model, folder):
    """The weights of a Llama in float64, LoRA added in: W + scale (A B)^T."""
    weights = float64(model)
    for name, a in mx.load(str(folder / "adapters.safetensors")).items():
        if name.endswith("lora_a"):
            b = mx.load(str(folder / "adapters.safetensors"))[name[:-1] + "b"]
            change = np.array(a, np.float64) @ np.array(b, np.float64)
            weights[name.replace("lora_a", "weight")] += LORA["scale"] * change.T
    return weights


def numpy_llama(weights, tokens_BT, layers=4, heads=4, kv_heads=2, head=16, theta=1e4, eps=1e-5):
    """Logits (B, T, V) of Llama, written from the paper's formulas, float64."""
    w = tree_unflatten(list(weights.items()))["model"]
    x = w["embed_tokens"]["weight"][tokens_BT]
    T = tokens_BT.shape[1]
    mask = np.triu(np.full((T, T), -np.inf), 1)
    angles = np.arange(T)[:, None] * theta ** (-np.arange(0, head, 2) / head)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def turned(x):  # (B, T, H, head), halves as pairs
        a, b = x[..., : head // 2], x[..., head // 2 :]
        c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    for layer in w["layers"][:layers]:
        attention, mlp = layer["self_attn"], layer["mlp"]
        h = norm(x, layer["input_layernorm"]["weight"])
        q, k, v = (
            (h @ attention[f"{name}_proj"]["weight"].T).reshape(*h.shape[:2], -1, head)
            for name in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (np.repeat(y, heads // kv_heads, axis=2) for y in (k, v))
        scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(head) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("bhts,bshd->bthd", scores, v).reshape(*h.shape[:2], -1)
        x = x + mixed @ attention["o_proj"]["weight"].T
        h = norm(x, layer["post_attention_layernorm"]["weight"])
        gate = h @ mlp["gate_proj"]["weight"].T
        up = h @ mlp["up_proj"]["weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down_proj"]["weight"].T
    return norm(x, w["norm"]["weight"]) @ w["embed_tokens"]["weight"].T
