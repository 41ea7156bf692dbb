"""The learner: one optimizer step, however the batch is cut; nothing bad reaches the weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from steadyrl.config import RunConfig
from steadyrl.engines.build import build_local_engine
from steadyrl.errors import TrainingError
from steadyrl.models.load import load_model
from steadyrl.pipeline.packing import advantages, pack
from steadyrl.recipe import build_config
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.trainer.learner import LocalLearner
from steadyrl.trainer.optim import learning_rate
from steadyrl.types import GenerationRequest, Rollout

TINY = "bundled:tiny_moe"
OBJECTIVES = ["grpo", "gspo", "sat-grpo", "sat-gspo"]


def config(objective: str = "sat-gspo", *overrides: str) -> RunConfig:
    base = {"objective": objective, "model": {"routing_replay": True}, "pipeline": {"lag": 8}, "trainer": {"lr": 3e-4}}
    return build_config(base, overrides)


@pytest.fixture(scope="module")
def groups(tokenizer) -> list[list[Rollout]]:
    """Rollouts of the base model; the rewards are made up so that every group has a signal."""
    engine = build_local_engine(TINY, "bfloat16", 64, records_routing=True)
    engine.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), version=0)
    task = Arithmetic(config().task, tokenizer, 0)
    short = Arithmetic(build_config({"task": {"terms": 3}}).task, tokenizer, 0)
    prompts = [*task.prompts("train", 0, 3), *short.prompts("train", 0, 2)]
    rollouts = engine.generate(GenerationRequest(prompts, 4, 32, 1.0, seed=1))
    for index, rollout in enumerate(rollouts):
        rollout.reward = float(index % 3 == 0)
    return [rollouts[start : start + 4] for start in range(0, 20, 4)]


def make(tokenizer, run: RunConfig) -> LocalLearner:
    return LocalLearner(load_model(TINY, torch.float32), tokenizer, run)


def step(learner: LocalLearner, run: RunConfig, groups, tokens: int, old_actor=None):
    rollouts = [rollout for group in groups for rollout in group]
    result = learner.train_step(pack(rollouts, advantages(groups, run.objective), tokens), old_actor)
    return result.metrics, result.histograms


def gradients(learner: LocalLearner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner._model.parameters() if p.grad is not None])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_cut_into_micro_batches_changes_nothing(tokenizer, groups, objective):
    run = config(objective, "trainer.max_grad_norm=1e9")
    results = []
    for tokens in (100_000, 120, 1):
        learner = make(tokenizer, run)
        step(learner, run, groups, 100_000)  # moves off the weights that sampled
        metrics, histograms = step(learner, run, groups, tokens)
        results.append((gradients(learner), metrics, histograms))
    whole, whole_metrics, whole_histograms = results[0]
    for gradient, metrics, histograms in results[1:]:
        torch.testing.assert_close(gradient, whole, atol=2e-6, rtol=2e-4)
        assert histograms["lag"] == whole_histograms["lag"]
        for name, values in histograms.items():
            assert values == pytest.approx(whole_histograms[name], rel=1e-3, abs=2e-5, nan_ok=True), name
        assert metrics.keys() == whole_metrics.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(whole_metrics[name], rel=1e-3, abs=2e-5), name


def test_at_equal_weights_the_gap_is_the_engine_s_numerics(tokenizer, groups):
    run = config()
    metrics, histograms = step(make(tokenizer, run), run, groups, 100_000)
    assert 0 < metrics["mismatch/d_bar"] < 0.02
    assert metrics["staleness/lag_max"] == metrics["staleness/lag_min"] == 0
    assert 0 <= metrics["penalty/kl_ref"] < 1e-3  # the reference keeps its own routing
    assert 0 <= metrics["routing/disagreement"] < 0.1
    assert sum(histograms["lag"]) == sum(rollout.num_sampled for group in groups for rollout in group)


def test_the_old_actor_anchor_starts_from_ratio_one(tokenizer, groups):
    run = config("sat-grpo", "objective.anchor=old_actor", "objective.kl_coef=0")
    learner = make(tokenizer, run)
    old_actor = {name: weight.clone() for name, weight in learner.named_weights().items()}
    metrics, _ = step(learner, run, groups, 100_000, old_actor)
    assert metrics["sat/q"] == 0
    assert metrics["mismatch/d_bar"] > 0  # of the engine, which is not the anchor
    weights = copy.deepcopy(learner.named_weights())
    metrics, _ = step(learner, run, groups, 200, old_actor)
    assert metrics["sat/q"] > 0
    moved = [not torch.equal(weights[name], weight) for name, weight in learner.named_weights().items()]
    assert any(moved)


def test_equal_rewards_move_nothing_without_a_penalty(tokenizer, groups):
    run = config("sat-gspo", "objective.kl_coef=0")
    learner = make(tokenizer, run)
    before = copy.deepcopy(learner.named_weights())
    equal = copy.deepcopy(groups)
    for group in equal:
        for rollout in group:
            rollout.reward = 0.7
    metrics, _ = step(learner, run, equal, 100_000)
    assert metrics["optim/grad_norm"] == 0
    assert all(torch.equal(before[name], weight) for name, weight in learner.named_weights().items())


def test_a_gradient_that_is_not_finite_stops_before_the_step_and_names_the_rollout(tokenizer, groups):
    run = config("grpo")
    learner = make(tokenizer, run)
    before = copy.deepcopy(learner.named_weights())
    poisoned = copy.deepcopy(groups)
    bad = poisoned[3][1]
    bad.reward = float("inf")  # a broken scorer: the advantages of its whole group are not numbers
    with pytest.raises(TrainingError, match=f"not finite.*{bad.prompt_id} \\(group {bad.group}\\)") as error:
        step(learner, run, poisoned, 100_000)
    assert str(error.value).count("rollout of") == str(error.value).count(f"(group {bad.group})") == 4
    assert learner.version == 0
    assert all(torch.equal(before[name], weight) for name, weight in learner.named_weights().items())
    metrics, _ = step(learner, run, groups, 100_000)
    assert np.isfinite(metrics["optim/grad_norm"])


def test_saved_and_loaded_goes_on_to_the_last_bit(tokenizer, groups, tmp_path):
    run = config()
    whole, halted = make(tokenizer, run), make(tokenizer, run)
    for learner in (whole, halted):
        step(learner, run, groups, 100_000)
    halted.save(tmp_path)
    resumed = make(tokenizer, run)
    resumed.load(tmp_path, version=1)
    expected, _ = step(whole, run, groups, 100_000)
    assert step(resumed, run, groups, 100_000)[0] == expected
    for name, weight in whole.named_weights().items():
        assert torch.equal(weight, resumed.named_weights()[name]), name


def test_a_step_on_right_answers_makes_them_likelier(tokenizer, groups):
    run = config("grpo", "trainer.lr=1e-3", "objective.kl_coef=0")
    learner = make(tokenizer, run)
    for _ in range(4):
        _metrics, _ = step(learner, run, groups, 100_000)
    rollouts = [rollout for group in groups for rollout in group]
    batch = pack(rollouts, advantages(groups, run.objective), 100_000)[0]
    with torch.no_grad():
        logp = learner._forward(batch).logp.view(batch.loss_mask.shape)
    change = ((logp - batch.behavior_logp) * batch.loss_mask).sum(1)
    assert change[batch.advantage > 0].mean() > change[batch.advantage < 0].mean() + 0.5


def test_warm_up_then_constant():
    run = build_config({"trainer": {"lr": 1.0, "lr_warmup_steps": 4}}).trainer
    assert [learning_rate(run, s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(build_config({"trainer": {"lr": 1.0}}).trainer, 0) == 1.0


@pytest.mark.parametrize("override", ["trainer.lr=1e39", "trainer.weight_decay=1e300"])
def test_a_step_that_makes_weights_that_are_not_numbers_is_taken_back(tokenizer, groups, override):
    run = config("grpo", override)
    learner = make(tokenizer, run)
    before = copy.deepcopy(learner.named_weights())
    with pytest.raises(TrainingError, match=r"still those of version 0.*trainer\.lr"):
        step(learner, run, groups, 100_000)
    assert learner.version == 0
    assert all(torch.equal(before[name], weight) for name, weight in learner.named_weights().items())
