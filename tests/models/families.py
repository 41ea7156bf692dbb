"""Tiny random models of the families in transformers, float32 and in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}

DENSE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"final_logit_softcapping": 3.0},
    "Gemma3Text": {"final_logit_softcapping": 2.0},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.25},
    "HyperCLOVAX": {"logits_scaling": 2.0},
    "Phi": {},
    "GPT2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS,
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Mixtral": LOCAL_EXPERTS,
    "Olmoe": EXPERTS,
    "GraniteMoe": LOCAL_EXPERTS,
    "GptOss": {**LOCAL_EXPERTS, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": None},
    "DeepseekV2": {**GROUPED, **LATENT, "first_k_dense_replace": 0, "topk_method": "greedy"},
    "DeepseekV3": {**GROUPED, **LATENT, "head_dim": 8, "first_k_dense_replace": 1},
    "Glm4Moe": {**GROUPED, "first_k_dense_replace": 0},
    "Ernie4_5_Moe": {**EXPERTS, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 0},
    "MiniMaxM2": LOCAL_EXPERTS,
    "HunYuanMoEV1": {"num_experts": 6, "moe_topk": [2, 2]},
    "Gemma4Text": {**EXPERTS, "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """The model of a family, with weights large enough that every token routes in its own way."""
    config = getattr(transformers, f"{name}Config")(
        **{**SIZES, **DENSE.get(name, {}), **MIXTURES.get(name, {}), **changes}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for name_, buffer in model.named_buffers():
            if name_.endswith("e_score_correction_bias"):  # the choice is not that of the scores alone
                buffer.uniform_(-0.2, 0.2)
    return model.eval()
