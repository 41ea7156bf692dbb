"""How a model is run for training: in chunks, with recomputed layers, in bfloat16. The step stays the same step."""

from __future__ import annotations

import copy

import pytest
import torch

from steadyrl.config import RunConfig
from steadyrl.engines.build import build_local_engine
from steadyrl.models import head, logprobs
from steadyrl.models.load import load_model, load_policy
from steadyrl.pipeline.packing import advantages, pack
from steadyrl.recipe import build_config
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.trainer.learner import LocalLearner
from steadyrl.types import GenerationRequest, Rollout

TINY = "bundled:tiny_moe"


def config(*overrides: str, objective: str = "sat-gspo") -> RunConfig:
    return build_config({"objective": objective, "model": {"routing_replay": True}, "pipeline": {"lag": 8}}, overrides)


@pytest.fixture(scope="module")
def groups(tokenizer) -> list[list[Rollout]]:
    engine = build_local_engine(TINY, "bfloat16", 64, records_routing=True)
    engine.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), version=0)
    prompts = list(Arithmetic(config().task, tokenizer, 0).prompts("train", 0, 4))
    rollouts = engine.generate(GenerationRequest(prompts, 4, 16, 1.0, seed=1, top_logprobs=4))
    for index, rollout in enumerate(rollouts):
        rollout.reward = float(index % 3 == 0)
    return [rollouts[start : start + 4] for start in range(0, 16, 4)]


def gradient_of_a_step(tokenizer, run: RunConfig, groups) -> torch.Tensor:
    """The gradient of the second step, when the policy is no longer the one that sampled."""
    learner = LocalLearner(load_policy(run.model), tokenizer, run)
    batches = pack([rollout for group in groups for rollout in group], advantages(groups, run.objective), 200)
    assert len(batches) > 1
    for _ in range(2):
        learner.train_step(copy.deepcopy(batches), None)
    parameters = list(learner._model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


@pytest.mark.parametrize("objective", ["sat-gspo", "dppo-topk-tv"])
def test_log_probabilities_in_chunks_give_the_same_gradient(tokenizer, groups, objective, monkeypatch):
    run = config("trainer.max_grad_norm=1e9", objective=objective)
    wanted = gradient_of_a_step(tokenizer, run, groups)
    calls = []
    plain = logprobs.chosen_logp
    monkeypatch.setattr(head, "MAX_LOGITS", 0)
    monkeypatch.setattr(head, "chosen_logp", lambda *args: calls.append(1) or plain(*args, max_logits=5 * 128))
    torch.testing.assert_close(gradient_of_a_step(tokenizer, run, groups), wanted, atol=2e-6, rtol=2e-4)
    assert calls


def test_recomputed_layers_give_the_same_bits(tokenizer, groups):
    wanted = gradient_of_a_step(tokenizer, config(), groups)
    found = gradient_of_a_step(tokenizer, config("model.gradient_checkpointing=true"), groups)
    assert torch.equal(found, wanted)


def test_bfloat16_products_give_nearly_the_same_gradient(tokenizer, groups):
    """Rounded to 8 bits everywhere, the direction stays; and it is not the float32 gradient by accident."""
    wanted = gradient_of_a_step(tokenizer, config(), groups)
    found = gradient_of_a_step(tokenizer, config("model.dtype=bfloat16"), groups)
    assert 0.9 < float(torch.cosine_similarity(found, wanted, dim=0)) < 0.99999
