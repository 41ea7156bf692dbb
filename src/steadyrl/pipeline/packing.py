"""From graded rollouts to micro-batches: pure functions.

Everything is shifted here, once: position t of a row speaks about the token that follows input t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.advantage import group_advantage
from steadyrl.types import Rollout, TrainBatch, as_tensor


def advantages(groups: Sequence[Sequence[Rollout]], objective: ObjectiveConfig) -> Tensor:
    """Advantages of the rollouts, group after group: [P * G] float32."""
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    return group_advantage(rewards, objective.advantage).flatten()


def pack(rollouts: Sequence[Rollout], advantage: Tensor, tokens_per_micro_batch: int) -> list[TrainBatch]:
    """Micro-batches of at most so many padded tokens; a longer rollout gets one of its own.

    Rollouts of like length are put together. No result depends on the cut: see `docs/objectives.md`.
    """
    order = sorted(range(len(rollouts)), key=lambda index: -len(rollouts[index].token_ids))
    micro_batches: list[TrainBatch] = []
    start = 0
    while start < len(order):
        width = len(rollouts[order[start]].token_ids) - 1  # the longest comes first
        stop = start + max(1, tokens_per_micro_batch // width)
        chosen = order[start:stop]
        micro_batches.append(pad([rollouts[index] for index in chosen], advantage[chosen]))
        start = stop
    return micro_batches


def pad(rollouts: Sequence[Rollout], advantage: Tensor) -> TrainBatch:
    """One micro-batch [S, W], W = longest rollout - 1, padded on the right."""
    size, width = len(rollouts), max(len(rollout.token_ids) for rollout in rollouts) - 1
    batch = TrainBatch(
        input_ids=torch.zeros(size, width, dtype=torch.int64),
        attention_mask=torch.zeros(size, width, dtype=torch.int64),
        target_ids=torch.zeros(size, width, dtype=torch.int64),
        loss_mask=torch.zeros(size, width, dtype=torch.bool),
        behavior_logp=torch.zeros(size, width),
        versions=torch.full((size, width), -1, dtype=torch.int64),
        advantage=advantage.clone(),
        routed_experts=_pad_experts(rollouts, width),
        rollout_ids=[f"{rollout.prompt_id} (group {rollout.group})" for rollout in rollouts],
        top_ids=_pad_top([rollout.top_ids for rollout in rollouts], width, torch.int64, 0),
        top_logp=_pad_top([rollout.top_logp for rollout in rollouts], width, torch.float32, -torch.inf),
    )
    for row, rollout in enumerate(rollouts):
        length = len(rollout.token_ids) - 1
        token_ids = as_tensor(rollout.token_ids, torch.int64)
        batch.input_ids[row, :length] = token_ids[:-1]
        batch.target_ids[row, :length] = token_ids[1:]
        batch.attention_mask[row, :length] = 1
        batch.loss_mask[row, :length] = as_tensor(rollout.loss_mask, torch.bool)[1:]
        batch.behavior_logp[row, :length] = as_tensor(rollout.behavior_logp, torch.float32)[1:]
        batch.versions[row, :length] = as_tensor(rollout.versions, torch.int64)[1:]
    return batch


def _pad_experts(rollouts: Sequence[Rollout], width: int) -> Tensor | None:
    """[S, W, L, K] int64, -1 on padding; None when no experts were recorded."""
    if rollouts[0].routed_experts is None:
        return None
    layers, k = rollouts[0].routed_experts.shape[1:]
    experts = torch.full((len(rollouts), width, layers, k), -1, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        assert rollout.routed_experts is not None, "an engine records the experts of every rollout or of none"
        experts[row, : len(rollout.routed_experts)] = as_tensor(rollout.routed_experts, torch.int64)
    return experts


def _pad_top(rows: Sequence[NDArray[Any] | None], width: int, dtype: torch.dtype, filler: float) -> Tensor | None:
    """[S, W, K], shifted like every other field; None when the engine kept no distributions."""
    if rows[0] is None:
        return None
    padded = torch.full((len(rows), width, rows[0].shape[1]), filler, dtype=dtype)
    for index, row in enumerate(rows):
        assert row is not None, "an engine keeps the distributions of every rollout or of none"
        padded[index, : len(row) - 1] = as_tensor(row, dtype)[1:]
    return padded
