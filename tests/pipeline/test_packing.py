"""Rollouts to micro-batches: the shift, the padding, the cut."""

from __future__ import annotations

import numpy as np
import torch

from steadyrl.config import ObjectiveConfig
from steadyrl.pipeline.packing import advantages, pack, pad
from steadyrl.types import Rollout


def rollout(prompt: list[int], response: list[int], reward: float = 0.0, first_expert: int = 0) -> Rollout:
    ids = np.array([*prompt, *response], np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    experts = (first_expert + np.arange(len(ids) - 1))[:, None, None] * np.ones((1, 2, 2), int) + np.arange(2)
    return Rollout(
        prompt_id="p",
        group=0,
        token_ids=ids,
        loss_mask=mask,
        behavior_logp=np.where(mask, -ids / 100, 0).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32),
        routed_experts=experts.astype(np.uint16),
        finish="stop",
        text="",
        reward=reward,
    )


def test_everything_speaks_about_the_target_token():
    batch = pad([rollout([1, 2, 3], [4, 5]), rollout([6], [7])], torch.tensor([0.5, -0.5]), [0, 1])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [6, 0, 0, 0]]
    assert batch.target_ids.tolist() == [[2, 3, 4, 5], [7, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True], [True, False, False, False]]
    torch.testing.assert_close(batch.behavior_logp, torch.tensor([[0, 0, -0.04, -0.05], [-0.07, 0, 0, 0]]))
    assert batch.versions.tolist() == [[-1, -1, 7, 7], [7, -1, -1, -1]]
    assert batch.advantage.tolist() == [0.5, -0.5]


def test_each_input_token_keeps_its_own_experts():
    batch = pad([rollout([1, 2], [3], first_expert=10), rollout([1], [2], first_expert=300)], torch.zeros(2), [0, 1])
    assert batch.routed_experts is not None
    assert batch.routed_experts[0, :, 0, 0].tolist() == [10, 11]
    assert batch.routed_experts[1, :, 0, 0].tolist() == [300, -1]
    assert batch.routed_experts[1, 0, 1].tolist() == [300, 301]


def test_no_rollout_is_lost_or_doubled_by_the_cut():
    rollouts = [rollout([1] * length, [2] * (1 + length % 3), reward=length) for length in range(1, 30)]
    marks = torch.arange(29, dtype=torch.float32)
    for budget in (1, 50, 200, 10_000):
        micro_batches = pack(rollouts, marks, budget)
        assert sorted(torch.cat([batch.advantage for batch in micro_batches]).tolist()) == marks.tolist()
        for batch in micro_batches:
            assert batch.input_ids.numel() <= budget or len(batch.input_ids) == 1
            for row, mark in enumerate(batch.advantage.int().tolist()):
                assert int(batch.attention_mask[row].sum()) == len(rollouts[mark].token_ids) - 1


def test_advantages_are_taken_within_the_group():
    groups = [[rollout([1], [2], reward=r) for r in rewards] for rewards in ([0.0, 0.0], [1.0, 1.0], [0.0, 1.0])]
    values = advantages(groups, ObjectiveConfig())
    assert values.tolist()[:4] == [0, 0, 0, 0]
    torch.testing.assert_close(values[4:], torch.tensor([-0.70710, 0.70710]), atol=1e-4, rtol=0)
