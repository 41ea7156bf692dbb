"""A request over several engines: nothing is lost, random numbers stay, and the order is that of the request."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from steadyrl.engines.build import build_local_engine
from steadyrl.errors import ConfigError
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.inline_backend import InlineBackend
from steadyrl.pipeline.splitting import join, split
from steadyrl.recipe import load_config
from steadyrl.types import GenerationRequest, Prompt, Rollout

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
NEVER = Stragglers(0.0, are_kept=False)


def request(prompts: int, first: int = 0) -> GenerationRequest:
    made = [Prompt(f"train/{first + i}", np.arange(1, 5 + i % 3, dtype=np.int32), "", "") for i in range(prompts)]
    return GenerationRequest(made, 3, max_response_tokens=6, temperature=1.0, seed=11, first=first)


def rollout(prompt: Prompt, group: int, token: int) -> Rollout:
    ones = np.ones(1, np.int32)
    return Rollout(prompt.prompt_id, group, ones * token, ones > 0, -ones.astype(np.float32), ones, None, "stop", "")


def answer(asked: GenerationRequest) -> list[Rollout]:
    """An engine whose tokens are its random numbers: of the seed and the prompt's place in the stream."""
    return [
        rollout(prompt, group, int(token))
        for group, prompt in enumerate(asked.prompts)
        for token in np.random.default_rng([asked.seed, asked.first + group]).integers(1000, size=3)
    ]


@pytest.mark.parametrize(("prompts", "engines"), [*itertools.product([1, 2, 3, 7, 8], [1, 2, 3, 5])])
def test_the_answers_to_the_shares_are_the_answer_to_the_whole(prompts, engines):
    whole = request(prompts, first=40)
    shares = split(whole, engines)
    sizes = [len(share.prompts) for share in shares]
    assert len(shares) == min(prompts, engines)
    assert sum(sizes) == prompts
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    joined, expected = join(shares, [answer(share) for share in shares]), answer(whole)
    assert [(one.prompt_id, one.group, one.token_ids.tolist()) for one in joined] == [
        (one.prompt_id, one.group, one.token_ids.tolist()) for one in expected
    ]


def test_an_answer_that_is_missing_is_not_passed_over():
    shares = split(request(4), 2)
    with pytest.raises(ValueError, match="shorter"):
        join(shares, [answer(shares[0])])


def test_the_inline_backend_samples_as_several_engines_do():
    """In float32 the embedded engine draws the same tokens, whatever else is in its batch."""
    sampled = []
    for replicas in (1, 3):
        engine = build_local_engine("bundled:tiny_moe", "float32", 8, False)
        backend = InlineBackend(engine, torch.float32, NEVER, replicas)
        backend.submit(request(5))
        sampled.append(backend.collect().rollouts)
    assert [one.token_ids.tolist() for one in sampled[0]] == [one.token_ids.tolist() for one in sampled[1]]
    assert [one.group for one in sampled[1]] == [group for group in range(5) for _ in range(3)]


def test_several_engines_need_a_backend_that_has_them():
    with pytest.raises(ConfigError, match=r"engine.replicas = 2.*pipeline.backend=ray"):
        load_config(RECIPE, ["engine.replicas=2"])
    assert load_config(RECIPE, ["engine.replicas=2", "pipeline.backend=ray"]).engine.replicas == 2
