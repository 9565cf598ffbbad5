"""Small random models of many architectures, for tests; built from mlx-lm's own classes.

model = build("qwen3")                      # float32, seeded, about 0.1 MB
add_lora(model, layers=2)                   # LoRA on every linear of the top layers
"""

import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

VOCABULARY = 160
LAYERS = 4
LINEAR = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)

_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_hidden_layers": 6,
    "sliding_window_pattern": 2,
    "sliding_window": 8,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
_GEMMA3N = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": 8,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": [*_MIXED, "full_attention"],
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 3,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_HUNYUAN = {
    "attention_bias": False,
    "moe_topk": 1,
    "num_experts": 1,
    "num_shared_expert": 1,
    "use_mixed_mlp_moe": False,
    "use_qk_norm": True,
    "use_cla": True,
    "cla_share_factor": 2,
    "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
}
_YARN = {"type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}
_MISTRAL = {
    "rope_parameters": {**_YARN, "original_max_position_embeddings": 8},
    "layer_types": _MIXED,
    "sliding_window": 8,
}

# name -> (module of mlx_lm.models, what differs from _BASE, bits or None)
CONFIGS: dict[str, tuple[str, dict, int | None]] = {
    "llama": ("llama", {}, None),
    "llama_untied": ("llama", {"tie_word_embeddings": False}, None),
    "llama_4bit": ("llama", {}, 4),
    "mistral": ("ministral3", _MISTRAL, None),
    "qwen3": ("qwen3", {}, None),
    "qwen3_moe": ("qwen3_moe", _EXPERTS, None),
    "qwen3_5": (
        "qwen3_5",
        {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "full_attention_interval": 2,
        },
        None,
    ),
    "gemma2": ("gemma2", {}, None),
    "gemma3_text": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, None),
    "gemma3n": ("gemma3n", _GEMMA3N, None),
    "gemma4_text": ("gemma4_text", _GEMMA4, None),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": _MIXED,
        },
        None,
    ),
    "cohere2": ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}, None),
    "granite": (
        "granite",
        {
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_bias": False,
            "mlp_bias": False,
        },
        None,
    ),
    "olmo3": ("olmo3", {"sliding_window": 8, "layer_types": _MIXED}, None),
    "hunyuan": ("hunyuan", _HUNYUAN, None),
    "rwkv7": (
        "rwkv7",
        {
            "norm_eps": 1e-5,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
        None,
    ),
    "nanbeige_looped": ("nanbeige", {"num_loops": 2}, None),
}


def build(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """A random float32 model of CONFIGS, evaluated; `changes` are config fields."""
    module_name, own, bits = CONFIGS[name]
    module = importlib.import_module(f"mlx_lm.models.{module_name}")
    fields = {**_BASE, **own, **changes, "model_type": module_name}
    if name == "gemma3n":
        fields = {"model_type": "gemma3n", "text_config": {**fields, "model_type": "gemma3n_text"}}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(fields))
    # Fresh biases, norms and sinks are all 0 or 1, which would hide a part left out.
    model.update(tree_map(lambda x: x + 0.05 * mx.random.normal(x.shape), model.parameters()))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def add_lora(model: nn.Module, layers: int, rank: int = 4, keys: list[str] | None = None) -> None:
    """Freeze the model and put LoRA on every linear (or `keys`) of its top layers."""
    model.freeze()
    keys = sorted(_linear_keys(model)) if keys is None else keys
    config = {"rank": rank, "scale": 10.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, layers, config)
    mx.eval(model.parameters())


def _linear_keys(model: nn.Module) -> set[str]:
    names = set()
    for layer in model.layers:
        for name, module in layer.named_modules():
            if isinstance(module, LINEAR) or hasattr(module, "to_lora"):
                names.add(name)
    return {name for name in names if not name.endswith("_coefs")}
