"""From terms per token to one number."""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.ratio import tokens_per_sequence
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts


def aggregation_weight(objective: ObjectiveConfig, layout: Layout, counts: BatchCounts) -> Tensor:
    """The weight of each token's term in the loss of the whole optimizer batch.

        token_mean      1 / (active tokens of the batch)                             DAPO, arXiv 2503.14476
        sequence_mean   1 / (active tokens of the response * responses of the batch)       GRPO, arXiv 2402.03300
        sequence_sum    1 / (responses of the batch): the mean over responses of the sum over their tokens
        constant        1 / (responses of the batch * aggregation_tokens)            Dr. GRPO, arXiv 2503.20783

    The counts are those of the batch, so the losses of its micro-batches (of whole responses) and of its
    ranks add up to the same number however it is cut. Tokens that a rejection leaves out are counted.

    Args:
        objective: its `aggregation` and `aggregation_tokens`.
        layout: of this micro-batch.
        counts: of the whole optimizer batch.

    Returns:
        [T] float64, 0 where masked.
    """
    responses = max(counts.num_sequences, 1)
    if objective.aggregation == "token_mean":
        denominator = _everywhere(layout, max(counts.num_tokens, 1))
    elif objective.aggregation == "sequence_mean":
        lengths = tokens_per_sequence(layout.loss_mask, layout.sequence, layout.num_sequences)
        denominator = lengths[layout.sequence] * responses
    elif objective.aggregation == "sequence_sum":
        denominator = _everywhere(layout, responses)
    else:
        assert objective.aggregation_tokens is not None, "the constant aggregation needs aggregation_tokens"
        denominator = _everywhere(layout, responses * objective.aggregation_tokens)
    return torch.where(layout.loss_mask, 1.0 / denominator, 0.0)


def _everywhere(layout: Layout, value: int) -> Tensor:
    return torch.full_like(layout.sequence, value, dtype=torch.float64)
