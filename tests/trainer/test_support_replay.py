"""Top-p and top-k: the trainer renormalizes over the tokens that the engine recorded (SAT paper, eq. 50)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from steadyrl.config import RunConfig
from steadyrl.engines.build import build_local_engine
from steadyrl.errors import EngineError
from steadyrl.models.load import load_model
from steadyrl.models.logprobs import token_logp
from steadyrl.pipeline.packing import pack, pad
from steadyrl.task_config import ArithmeticTask
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.trainer.learner import LocalLearner
from steadyrl.types import GenerationRequest, Rollout

TINY = "bundled:tiny_moe"


@pytest.fixture(scope="module")
def rollouts(tokenizer) -> list[Rollout]:
    """Sampled in float32 at temperature 1.2 from the 80 % likeliest tokens, by the weights that are trained."""
    engine = build_local_engine(TINY, "float32", 64, records_routing=True)
    engine.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), version=0)
    prompts = Arithmetic(ArithmeticTask(), tokenizer, 0).prompts("train", 0, 4)
    return engine.generate(GenerationRequest(prompts, 4, 24, 1.2, seed=3, top_p=0.8))


def learner(tokenizer, **sampling: float) -> LocalLearner:
    config = RunConfig.model_validate(
        {
            "objective": "grpo",
            "sampling": {"temperature": 1.2, "max_response_tokens": 24, **sampling},
            "model": {"routing_replay": True},
        }
    )
    return LocalLearner(load_model(TINY, torch.float32), tokenizer, config)


def advantage(rollouts: list[Rollout]) -> torch.Tensor:
    return torch.linspace(-1, 1, len(rollouts))


@pytest.mark.parametrize("tokens_per_micro_batch", [100, 10_000])
def test_an_unchanged_policy_has_ratio_one(tokenizer, rollouts, tokens_per_micro_batch):
    batches = pack(rollouts, advantage(rollouts), tokens_per_micro_batch)
    result = learner(tokenizer, top_p=0.8).train_step(batches, None)
    assert result.metrics["mismatch/d_bar"] < 1e-5
    whole = pack([without_support(rollout) for rollout in rollouts], advantage(rollouts), tokens_per_micro_batch)
    assert learner(tokenizer).train_step(whole, None).metrics["mismatch/d_bar"] > 1e-2, "top-p cut nothing here"


def test_the_gradient_is_that_of_a_softmax_over_the_support(tokenizer, rollouts):
    """Against logits of the whole vocabulary with everything outside the recorded set moved to -inf."""
    batch = pad(rollouts[:3], advantage(rollouts[:3]), [0, 1, 2])
    batch = dataclasses.replace(batch, routed_experts=None)
    trained = learner(tokenizer, top_p=0.8)
    trained._replays = False
    trained._forward(batch).logp.sum().backward()
    model = load_model(TINY, torch.float32)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    assert batch.support_ids is not None
    assert batch.support_lengths is not None
    outside = torch.ones_like(logits, dtype=torch.bool)
    for row, (ids, lengths) in enumerate(zip(batch.support_ids, batch.support_lengths, strict=True)):
        for position, allowed in enumerate(torch.split(ids, lengths.tolist())):
            outside[row, position, allowed] = False
    sampled = batch.loss_mask
    token_logp(logits[sampled].masked_fill(outside[sampled], -1e30), batch.target_ids[sampled], 1.2).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in trained._model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-4, rtol=1e-3)


def test_rollouts_without_the_record_are_refused(tokenizer, rollouts):
    batches = pack([without_support(rollout) for rollout in rollouts], advantage(rollouts), 10_000)
    trained = learner(tokenizer, top_p=0.8)
    with pytest.raises(EngineError, match=r"does not record .* set sampling\.top_p=1"):
        trained.train_step(batches, None)
    assert trained.version == 0


def test_a_token_outside_its_record_is_refused(tokenizer, rollouts):
    broken = dataclasses.replace(rollouts[0], support_ids=np.full_like(rollouts[0].support_ids, 3))
    with pytest.raises(EngineError, match="not in its recorded support"):
        learner(tokenizer, top_p=0.8).train_step(pack([broken], torch.ones(1), 10_000), None)


def test_objectives_over_whole_distributions_are_refused():
    with pytest.raises(ValueError, match="whole distributions"):
        RunConfig.model_validate(
            {"objective": {"boundary": {"rule": "dppo", "divergence": "topk_tv"}}, "sampling": {"top_p": 0.9}}
        )


def without_support(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, support_ids=None, support_lengths=None)
