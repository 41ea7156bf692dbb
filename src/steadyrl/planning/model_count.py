"""The sizes of a model, counted from its config.json alone: no weights are loaded and none are allocated."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from steadyrl.errors import ConfigError
from steadyrl.models.load import resolve_path
from steadyrl.planning.model_shape import ModelShape

# config.json of models that a recipe names and a machine without network has to plan for
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
}
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B-Base": _QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B": {**_QWEN3_30B_A3B, "max_position_embeddings": 40_960},
}
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what config classes call it


def count_model(path: str) -> ModelShape:
    """The shape of the model at `model.path`.

    Raises:
        ConfigError: there is no config.json to be had, or it is not that of a causal language model.
    """
    config = _config(path)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return _count(model, config.get_text_config())
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the sizes of {path} cannot be read from its config.json ({error}): set model.path to a causal language "
            "model with attention layers"
        ) from None


def _config(path: str) -> Any:
    if path in KNOWN:
        return AutoConfig.for_model(**KNOWN[path])
    folder, gguf_file = resolve_path(path)
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # files from outside can be broken in any way, and the hub may be out of reach
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"no config.json of {path} can be read ({reason}): set model.path to a folder that holds one"
        ) from None


def _count(model: torch.nn.Module, text: Any) -> ModelShape:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    in_experts = {name: size for name, size in sizes.items() if ".experts." in name}
    moe_layers = {name.partition(".experts.")[0] for name in in_experts}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        before, found, after = name.partition(".layers.")
        if found:
            layer = f"{before}.{after.partition('.')[0]}"
            layers[layer] = layers.get(layer, 0) + size
    experts = next((getattr(text, name) for name in NUM_EXPERTS if hasattr(text, name)), 0) if moe_layers else 0
    return ModelShape(
        parameters=sum(sizes.values()),
        expert_parameters=sum(in_experts.values()),
        parameter_tensors=len(sizes),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_width=(getattr(text, "moe_intermediate_size", None) if moe_layers else None) or text.intermediate_size,
        vocabulary=text.vocab_size,
        moe_layers=len(moe_layers),
        experts=experts,
        experts_per_token=text.num_experts_per_tok if moe_layers else 0,
        positions=text.max_position_embeddings,
        largest_layer=max(layers.values(), default=sum(sizes.values())),
    )
