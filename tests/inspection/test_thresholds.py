"""Blocks that take turns find the same threshold as one call that sees everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steadyrl.inspection import archive
from steadyrl.inspection.archive import Archive
from steadyrl.inspection.response import Response
from steadyrl.inspection.thresholds import step_thresholds
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import batch_threshold, trust_region_score
from steadyrl.objective.rule import Layout


def response(rng, n, scale, step=0, age=0):
    behavior = -rng.exponential(1.0, n).astype(np.float32)
    d = rng.laplace(0, scale, n) * (rng.random(n) > 0.3)  # some are exactly 0
    return Response(
        step=("step", step),
        loss_mask=np.ones(n, bool),
        behavior_logp=behavior,
        trainer_logp=(behavior + d).astype(np.float32),
        old_logp=(behavior + 0.3 * d).astype(np.float32),
        advantage=np.full(n, rng.normal(), np.float32),
        versions=np.full(n, 10 - age, np.int32),
        train_version=10,
    )


def filled(responses):
    store = Archive()
    for one in responses:
        store.add(one)
    return store


def threshold(store, step, objective):
    """Asked for together with others, which must not get into its way."""
    others = {name: ObjectiveConfig.model_validate(name) for name in ("grpo", "sat-grpo", "sat-gspo", "m2po")}
    found, _ = step_thresholds(store, step, {**others, "asked": objective}, {"q50": 0.5})
    assert found["grpo"] is None
    return found["asked"]


def everything(responses):
    sizes = torch.tensor([len(one.loss_mask) for one in responses])
    sequence = torch.repeat_interleave(torch.arange(len(responses)), sizes)
    layout = Layout(torch.ones(len(sequence), dtype=torch.bool), sequence, len(responses))
    fields = ("trainer_logp", "behavior_logp", "old_logp")
    return layout, *(torch.from_numpy(np.concatenate([getattr(one, name) for one in responses])) for name in fields)


@pytest.mark.parametrize("block_tokens", [1, 200, 10**6])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 2.0])
@pytest.mark.parametrize(
    "preset", ["sat-grpo", "sat-gspo", "sat-gspo-response", "sat-grpo-tis", "sat-gspo-tis", "sat-grpo-lag", "m2po"]
)
def test_threshold_of_a_step(monkeypatch, preset, scale, block_tokens):
    monkeypatch.setattr(archive, "BLOCK_TOKENS", block_tokens)
    rng = np.random.default_rng(3)
    responses = [response(rng, int(rng.integers(1, 90)), scale, age=index % 5) for index in range(25)]
    objective = ObjectiveConfig.model_validate(preset)
    layout, logp, behavior, old = everything(responses)
    anchor = old if objective.anchor == "old_actor" else behavior
    age = torch.tensor([index % 5 for index in range(25)])[layout.sequence]
    oracle = batch_threshold(objective, trust_region_score(objective, logp, anchor, layout), layout, age)
    with filled(responses) as store:
        (step,) = store.steps()
        assert torch.equal(threshold(store, step, objective), oracle)


@pytest.mark.parametrize("values", [[0.0] * 9, [0.5] * 9, [0.0, 0.0, 3.0], [1e-3, 0.1, 0.25, 0.25, 0.25, 4.0]])
def test_limit_of_m2po_at_its_edges(monkeypatch, values):
    monkeypatch.setattr(archive, "BLOCK_TOKENS", 1)
    objective = ObjectiveConfig.model_validate("m2po")
    behavior = np.full(1, -5.0, np.float32)
    responses = [
        Response(("step", 0), np.ones(1, bool), behavior, (behavior + value).astype(np.float32)) for value in values
    ]
    layout = Layout(torch.ones(len(values), dtype=torch.bool), torch.arange(len(values)), len(values))
    logp = torch.tensor([float(one.trainer_logp[0]) for one in responses])
    score = trust_region_score(objective, logp, torch.full((len(values),), -5.0), layout)
    with filled(responses) as store:
        (step,) = store.steps()
        assert torch.equal(threshold(store, step, objective), batch_threshold(objective, score, layout))


def test_quantile_of_a_step(monkeypatch):
    monkeypatch.setattr(archive, "BLOCK_TOKENS", 64)
    rng = np.random.default_rng(0)
    responses = [response(rng, 50, 0.1) for _ in range(10)]
    sizes = np.sort(np.concatenate([np.abs(one.trainer_logp - one.behavior_logp) for one in responses]))
    with filled(responses) as store:
        (step,) = store.steps()
        _, quantiles = step_thresholds(store, step, {}, {"q99": 0.99, "q50": 0.5})
        assert quantiles == {"q99": sizes[495 - 1], "q50": sizes[250 - 1]}


def test_steps_in_any_order(monkeypatch):
    """Rows of one step that lie apart come together, steps come in order, and no response is cut."""
    monkeypatch.setattr(archive, "BLOCK_TOKENS", 60)
    rng = np.random.default_rng(1)
    responses = [response(rng, 30 + index, 0.1, step=index * 7 % 3) for index in range(9)]
    with filled(responses) as store:
        steps = store.steps()
        assert [step.key for step in steps] == [("step", 0), ("step", 1), ("step", 2)]
        for step in steps:
            mine = [one for one in responses if one.step == step.key]
            blocks = list(store.blocks(step))
            assert [block.layout.num_sequences for block in blocks] == [2, 1]
            found = torch.cat([block.logp for block in blocks]).numpy()
            assert np.array_equal(found, np.concatenate([one.trainer_logp for one in mine]))
