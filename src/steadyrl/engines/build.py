"""From a description to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from steadyrl.config import RunConfig
from steadyrl.engines.dialect import Dialect
from steadyrl.engines.local_engine import LocalEngine
from steadyrl.engines.remote_engine import RemoteEngine
from steadyrl.engines.sglang_engine import MoeLayers, SglangDialect
from steadyrl.engines.vllm_engine import VllmDialect
from steadyrl.models.load import eos_token_ids, load_model, load_tokenizer
from steadyrl.models.routing import routers
from steadyrl.types import GenerationRequest, Prompt

# what a server samples to show which weights it holds: enough tokens for a mean, few enough not to be noticed
PROBE_PROMPTS = 4
PROBE_SAMPLES = 4
PROBE_TOKENS = 32


def build_local_engine(
    model_path: str,
    dtype: str,
    max_sequences: int,
    records_routing: bool,
    cache_on_update: Literal["keep", "rebuild"] = "keep",
) -> LocalEngine:
    """The embedded engine on a model of its own. Its weights count only after the first broadcast."""
    model = load_model(model_path, getattr(torch, dtype))
    tokenizer = load_tokenizer(model_path)
    return LocalEngine(
        model.requires_grad_(False),
        tokenizer,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_sequences=max_sequences,
        records_routing=records_routing,
        cache_on_update=cache_on_update,
    )


def build_remote_engine(config: RunConfig, prompts: Sequence[Prompt]) -> RemoteEngine:
    """The servers of a configuration, as one engine; see `RemoteEngine` for what is raised.

    Args:
        prompts: `PROBE_PROMPTS` of them, that servers are tried with.
    """
    probe = probe_request(config, prompts)
    mirror = load_model(config.model.path, getattr(torch, config.engine.dtype))
    tokenizer = load_tokenizer(config.model.path)
    dialect = build_dialect(config, mirror, tokenizer)
    return RemoteEngine(config.engine, dialect, mirror, tokenizer, probe, records_routing=config.model.routing_replay)


def probe_request(config: RunConfig, prompts: Sequence[Prompt]) -> GenerationRequest:
    """What a server samples to show which weights it holds, with the sampling settings of the run."""
    sampling = config.sampling
    return GenerationRequest(
        list(prompts),
        PROBE_SAMPLES,
        min(PROBE_TOKENS, sampling.max_response_tokens),
        sampling.temperature,
        seed=0,  # servers draw their own random numbers
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def build_dialect(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Dialect:
    """What the servers of a configuration speak.

    Raises:
        ConfigError: routing is replayed, and the model has no router that is known here.
    """
    eos = sorted(eos_token_ids(model, tokenizer))
    if config.engine.kind == "sglang":
        return SglangDialect(eos, moe_layers(model) if config.model.routing_replay else None)
    assert config.engine.kind == "vllm"
    return VllmDialect(eos)


def moe_layers(model: PreTrainedModel) -> MoeLayers:
    """The layers of a model that have a router.

    Raises:
        ConfigError: there is none that is known here.
    """
    known = {id(router) for router in routers(model)}
    names = [name for name, module in model.named_modules() if id(module) in known]
    numbers = (next(part for part in name.split(".") if part.isdigit()) for name in names)
    return MoeLayers(tuple(map(int, numbers)), int(model.config.get_text_config().num_experts_per_tok))
