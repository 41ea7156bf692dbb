"""From graded rollouts to micro-batches: pure functions.

Everything is shifted here, once: position t of a row speaks about the token that follows input t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.advantage import group_advantage
from steadyrl.types import Rollout, TrainBatch


def advantages(groups: Sequence[Sequence[Rollout]], objective: ObjectiveConfig) -> Tensor:
    """Advantages of the rollouts, group after group: [P * G] float32."""
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    return group_advantage(rewards, objective.advantage).flatten()


def pack(
    rollouts: Sequence[Rollout], advantage: Tensor, tokens_per_micro_batch: int, ranks: int = 1
) -> list[TrainBatch]:
    """Micro-batches of at most so many padded tokens; a longer rollout gets one of its own.

    Rollouts of like length are put together. No result depends on the cut: see `docs/objectives.md`.

    Returns:
        As many for each rank, one rank after the other; `share` takes them apart. A rank with fewer than others is
        given blank ones.
    """
    parts = [
        _pack_in_order(rollouts, advantage, tokens_per_micro_batch, order)
        for order in balanced([len(rollout.token_ids) for rollout in rollouts], ranks)
    ]
    most = max(len(part) for part in parts)
    blank = parts[0][0].blank()  # the longest rollout went to the first rank
    return [batch for part in parts for batch in part + [blank] * (most - len(part))]


def share(micro_batches: Sequence[TrainBatch], rank: int, ranks: int) -> list[TrainBatch]:
    """Those of one rank, of what `pack` made for so many."""
    size = len(micro_batches) // ranks
    return list(micro_batches[rank * size : (rank + 1) * size])


def balanced(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Which rollouts each rank trains on, longest first: each goes to the rank that has the fewest tokens so far.

    The rank with the most tokens then has at most 4/3 of the best possible (Graham 1969). One rank gets all.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    return shares


def _pack_in_order(
    rollouts: Sequence[Rollout], advantage: Tensor, tokens_per_micro_batch: int, order: Sequence[int]
) -> list[TrainBatch]:
    """Micro-batches of some of the rollouts, which come in order of falling length."""
    micro_batches: list[TrainBatch] = []
    start = 0
    while start < len(order):
        width = len(rollouts[order[start]].token_ids) - 1  # the longest comes first
        stop = start + max(1, tokens_per_micro_batch // width)
        chosen = list(order[start:stop])
        micro_batches.append(pad([rollouts[index] for index in chosen], advantage[chosen], chosen))
        start = stop
    return micro_batches


def pad(rollouts: Sequence[Rollout], advantage: Tensor, sources: Sequence[int]) -> TrainBatch:
    """One micro-batch [S, W], W = longest rollout - 1, padded on the right."""
    lengths = np.array([len(rollout.token_ids) - 1 for rollout in rollouts])
    width = int(lengths.max())

    def targets(field: str, dtype: Any, filler: float) -> Tensor | None:
        """What a rollout says about each token but the first, which nothing predicts."""
        rows = [getattr(rollout, field) for rollout in rollouts]
        return None if rows[0] is None else _padded([row[1:] for row in rows], width, dtype, filler)

    fields: dict[str, Any] = {
        "target_ids": targets("token_ids", np.int64, 0),
        "loss_mask": targets("loss_mask", np.bool_, False),
        "behavior_logp": targets("behavior_logp", np.float32, 0.0),
        "versions": targets("versions", np.int64, -1),
        "top_ids": targets("top_ids", np.int64, 0),
        "top_logp": targets("top_logp", np.float32, -np.inf),
        "support_lengths": targets("support_lengths", np.int64, 0),
    }
    supports = [torch.from_numpy(r.support_ids.astype(np.int64)) for r in rollouts if r.support_ids is not None]
    assert len(supports) in (0, len(rollouts)), "an engine records the support of every rollout or of none"
    experts = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    assert len(experts) in (0, len(rollouts)), "an engine records the experts of every rollout or of none"
    return TrainBatch(
        input_ids=_padded([rollout.token_ids[:-1] for rollout in rollouts], width, np.int64, 0),
        attention_mask=torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64)),
        advantage=advantage.clone(),
        routed_experts=_padded(experts, width, np.int64, -1) if experts else None,
        rollout_ids=[f"{rollout.prompt_id} (group {rollout.group})" for rollout in rollouts],
        sources=list(sources),
        support_ids=supports or None,
        **fields,
    )


def _padded(rows: Sequence[NDArray[Any]], width: int, dtype: Any, filler: float) -> Tensor:
    """[S, W, ...] from S rows [n, ...]; the padding holds `filler`."""
    padded = np.full((len(rows), width, *rows[0].shape[1:]), filler, dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)
