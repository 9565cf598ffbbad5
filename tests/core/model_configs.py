"""A small random model of every architecture of mlx-lm that one can be made for.

`COMMON` holds small values for the field names that architectures share; `OWN` adds or changes
what one needs. Widths and counts are as small as the architecture's code allows; layers differ in
kind where it knows several, so that a cut meets each.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx import nn
from mlx.utils import tree_map

HELPERS = frozenset(
    {"__init__", "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla"}
    | {"pipeline", "rope_utils", "ssm", "switch_layers"}
)
"""Modules of mlx_lm.models that are no architecture."""

VOCABULARY = 160
LAYERS = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "sliding_window": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    # linear attention and state spaces
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "state_size": 8,
    "time_step_rank": 4,
    # scales
    "logits_scaling": 4.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "dim_model_base": 32,
    "scale_depth": 1.4,
    "scale_emb": 2.0,
    # names of the GPT family
    "n_embd": 64,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_inner": 96,
    "n_positions": 128,
    "n_ctx": 128,
}
SLIDING = ["sliding_attention", "full_attention"] * 2

YARN = {
    "type": "yarn",
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
LINEAR_ATTENTION = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
LONGCAT = {
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
LFM2 = {
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
}
ROPE_BY_KIND = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in set(SLIDING)}
MISTRAL_ROPE = {
    "type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 8,
}
GEMMA3N = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": [*SLIDING, "full_attention"],
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 3,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "sliding_window_pattern": 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
QWEN3_5 = {"full_attention_interval": 2, "num_experts": 0}

OWN: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 64,
        "num_kv_reuse_layers": 2,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "afmoe": {"layer_types": SLIDING, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
    "bailing_moe_v3": {
        "layer_group_size": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "dbrx": {
        "d_model": 64,
        "n_layers": LAYERS,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "deepseek_v32": {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    "deepseek_v41": {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 4,
        "o_lora_rank": 8,
        "o_groups": 2,
        "compress_ratios": (0, 4, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1,),
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {
        "layer_types": SLIDING,
        "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "gear": {"layer_types": SLIDING},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma4_text": GEMMA4,
    "glm_moe_dsa": {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 10000.0},
    },
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
    "gpt_oss": {"layer_types": SLIDING},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "moe_topk": 1,
        "num_experts": 1,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": False,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_linear": {
        "linear_attn_config": LINEAR_ATTENTION,
        "model_max_length": 128,
        "num_experts_per_token": 2,
    },
    "laguna": {"layer_types": SLIDING},
    "lfm2": LFM2,
    "lfm2_moe": {"use_expert_bias": True, "num_dense_layers": 1, "full_attn_idxs": [1, 3]},
    "lille-130m": {"block_size": 128, "n_kv_heads": 2},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": {**LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 3},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "time_step_limit": (0.001, 100.0),
    },
    "mellum": {"layer_types": SLIDING, "rope_parameters": ROPE_BY_KIND},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 128}},
    "minimax": {"shared_intermediate_size": 32, "rotary_dim": 8},
    "ministral3": {"rope_parameters": MISTRAL_ROPE, "layer_types": SLIDING},
    "mistral4": {"rope_parameters": MISTRAL_ROPE},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ]
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "n_groups": 1,
        "hybrid_override_pattern": "M*-M",
    },
    "olmo3": {"layer_types": SLIDING},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        "num_transformer_layers": LAYERS,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
    },
    "phixtral": {"num_vocab": VOCABULARY, "model_dim": 64, "num_heads": 4, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"mamba_num_heads": 4, "hidden_size_per_head": 16, "mamba_d_state": 8},
    "plamo3": {"window_size": 8, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16},
    "qwen3_next": {"partial_rotary_factor": 0.5, "full_attention_interval": 2},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "solar_open": {"partial_rotary_factor": 1.0},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.gate_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
    },
    "spark2_5": {"rope_parameters": ROPE_BY_KIND},
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.25},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5, "rope_scaling": None},
}
TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "gemma3n": {"model_type": "gemma3n_text", **GEMMA3N},
    "gemma4": {"model_type": "gemma4_text", **GEMMA4},
    "kimi_k25": {"model_type": "deepseek_v3"},
    "kimi_k3": {
        "linear_attn_config": LINEAR_ATTENTION,
        "num_experts_per_token": 2,
        "attn_res_block_size": 2,
    },
    "kimi_vl": {"model_type": "deepseek_v3"},
    "lfm2-vl": LFM2,
    "llama4": {
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "rope_scaling": None,
    },
    "minimax_m3_vl": {"dense_intermediate_size": 96, "shared_intermediate_size": 32},
    "mistral3": {"model_type": "llama"},
    "muse_spark": {
        "post_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "layer_rope_theta": [10000.0, 0.0, 10000.0, 10000.0],
        "layer_types": SLIDING,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 0.5,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "pixtral": {"model_type": "llama"},
    "prism_hadamard_qwen35": {**QWEN3_5, "hidden_size": 128},
    "qwen2_vl": {"model_type": "qwen2"},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": {"full_attention_interval": 2},
    "qwen3_vl": {"model_type": "qwen3"},
    "qwen3_vl_moe": {"model_type": "qwen3_moe"},
}


VARIANTS = {"nanbeige, 2 loops": ("nanbeige", {"num_loops": 2})}
"""Name -> (architecture, what is different): where a setting of the config decides."""


def names() -> list[str]:
    """Every architecture of mlx-lm, by the name of its module, and the variants."""
    files = {file.stem for file in Path(mlx_lm.models.__path__[0]).glob("*.py")}
    return sorted((files - HELPERS) | VARIANTS.keys())


def build(name: str) -> nn.Module:
    """A random float32 model, evaluated. Raises what the architecture's code raises."""
    name, changes = VARIANTS.get(name, (name, {}))
    module = importlib.import_module(f"mlx_lm.models.{name}")
    fields = {**COMMON, **OWN.get(name, {}), **changes, "model_type": name}
    if name in TEXT:
        fields["text_config"] = {**COMMON, "model_type": name, **TEXT[name]}
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(fields))
    model.update(tree_map(_perturbed, model.parameters()))
    mx.eval(model.parameters())
    return model


def _perturbed(array: mx.array) -> mx.array:
    """Fresh biases, norms and sinks are all 0 or 1, which would hide a part left out."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return (array + 0.05 * mx.random.normal(array.shape)).astype(array.dtype)
