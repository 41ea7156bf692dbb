"""Decoding as simple as it can be: one sequence, no cache, no batch, sampling written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from steadyrl.engines.sequence import Sequence
from steadyrl.types import GenerationRequest, Prompt

VOCAB = 24
EOS = frozenset({1, 2})
CONTEXT = 32
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_position_embeddings": CONTEXT,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "gemma2": lambda: Gemma2Config(**_SIZES, sliding_window=4),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=CONTEXT),
}


def random_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny float32 model whose distributions are neither flat nor certain."""
    config = FAMILIES[family]()
    config._attn_implementation = "sdpa" if family != "gemma2" else "eager"
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def random_sequence(seed: int, **settings: object) -> Sequence:
    """A prompt of random length, limit and settings, each of which `settings` may replace."""
    rng = np.random.default_rng(seed)
    prompt = Prompt(f"p{seed}", rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32), "", "")
    given = {"max_response_tokens": int(rng.integers(1, 14)), "temperature": float(rng.choice([0.6, 1.0, 1.4]))}
    request = GenerationRequest([prompt], 1, seed=seed, **{**given, **settings})  # type: ignore[arg-type]
    return Sequence(prompt, 0, request, rng.random(request.max_response_tokens))


@dataclass(frozen=True)
class Expected:
    tokens: list[int]
    logp: list[float]
    support: list[list[int]]
    finish: str


def brute_force(sequence: Sequence, next_logits: Callable[[list[int]], np.ndarray]) -> Expected:
    """What a sequence becomes when `next_logits` answers, for the tokens so far, with the logits [V] of the next."""
    request, ids = sequence.request, sequence.prompt.token_ids.tolist()
    tokens: list[int] = []
    chosen: list[float] = []
    supports: list[list[int]] = []
    while len(tokens) < request.max_response_tokens:
        banned = EOS if len(tokens) < request.min_response_tokens else frozenset()
        probability = distribution(next_logits(ids + tokens), request.temperature, request.top_p, request.top_k, banned)
        token, mass = -1, 0.0
        for candidate, share in enumerate(probability):
            mass += share
            if share > 0 and sequence.noise[len(tokens)] < mass:
                token = candidate
                break
        assert token >= 0
        tokens.append(token)
        chosen.append(float(np.log(probability[token])))
        supports.append([candidate for candidate, share in enumerate(probability) if share > 0])
        if token in EOS:
            return Expected(tokens, chosen, supports, "stop")
    return Expected(tokens, chosen, supports, "length")


def distribution(
    logits: np.ndarray, temperature: float, top_p: float = 1.0, top_k: int = 0, banned: frozenset[int] = frozenset()
) -> list[float]:
    """Probabilities [V]: temperature, then top-k, then top-p over what is left, renormalized at each step."""
    z = [float(logit) / temperature for logit in logits]
    allowed = [token for token in range(len(z)) if token not in banned]
    allowed.sort(key=lambda token: (-z[token], token))
    if top_k:
        allowed = allowed[:top_k]
    weights = [np.exp(z[token] - z[allowed[0]]) for token in allowed]
    if top_p < 1:
        total, mass, kept = sum(weights), 0.0, 0
        while mass < top_p * total:
            mass += weights[kept]
            kept += 1
        allowed, weights = allowed[:kept], weights[:kept]
    probability = [0.0] * len(z)
    for token, weight in zip(allowed, weights, strict=True):
        probability[token] = weight / sum(weights)
    return probability


def plain_logits(model: PreTrainedModel) -> Callable[[list[int]], np.ndarray]:
    """Logits of the token after some tokens, by a forward pass over all of them."""

    def next_logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()

    return next_logits


def check(sequence: Sequence, expected: Expected) -> None:
    assert sequence.tokens.tolist() == expected.tokens
    assert sequence.finish == expected.finish
    np.testing.assert_allclose(sequence.logp, expected.logp, atol=2e-5)
    if sequence.is_restricted:
        assert [ids.tolist() for ids in sequence.support] == expected.support
