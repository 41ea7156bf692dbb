"""From terms per token to one number."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from steadyrl.objective.ratio import tokens_per_sequence
from steadyrl.types import BatchCounts


def aggregation_weight(
    aggregation: Literal["token_mean", "sequence_mean"],
    loss_mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    counts: BatchCounts,
) -> Tensor:
    """The weight of each token's term in the loss of the whole optimizer batch.

        token_mean      1 / (active tokens of the batch)
        sequence_mean   1 / (active tokens of the sequence * sequences of the batch)

    The counts are those of the batch, so the losses of its micro-batches (of whole sequences) add up
    to the same number however it is cut.

    Args:
        loss_mask: [T] bool.
        sequence: [T] int64, which of the S sequences of this micro-batch a token belongs to.
        num_sequences: S.
        counts: of the whole optimizer batch.

    Returns:
        [T] float64, 0 where masked.
    """
    if aggregation == "token_mean":
        denominator = torch.full_like(sequence, max(counts.num_tokens, 1), dtype=torch.float64)
    else:
        lengths = tokens_per_sequence(loss_mask, sequence, num_sequences)
        denominator = lengths[sequence] * max(counts.num_sequences, 1)
    return torch.where(loss_mask, 1.0 / denominator, 0.0)
