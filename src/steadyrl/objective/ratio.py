"""Log-ratios between the policy being trained and an anchor policy."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The dtype in which log-probabilities may be subtracted: float32, or float64 if any of them has it."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def token_log_ratio(logp: Tensor, anchor_logp: Tensor, loss_mask: Tensor) -> Tensor:
    """d = logp - anchor_logp of every token (paper, Eq. 1), differentiable in `logp` only.

    Args:
        logp: [T], floating point.
        anchor_logp: [T], floating point.
        loss_mask: [T] bool.

    Returns:
        [T] float32 (float64 if an input is), exactly 0 where masked.
    """
    dtype = at_least_float32(logp, anchor_logp)
    # both sides are replaced before the subtraction: a masked NaN or inf must not reach the backward pass either
    current = torch.where(loss_mask, logp.to(dtype), 0.0)
    anchor = torch.where(loss_mask, anchor_logp.detach().to(dtype), 0.0)
    return current - anchor


def sequence_log_ratio(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """log rho_b = mean of the log-ratio over the active tokens of sequence b (paper, Eq. 20), on each of them.

    Args:
        log_ratio: [T] from `token_log_ratio`.
        loss_mask: [T] bool.
        sequence: [T] int64, which of the S sequences a token belongs to.
        num_sequences: S.

    Returns:
        [T] in the dtype of `log_ratio`, 0 where masked.
    """
    active = torch.where(loss_mask, log_ratio, 0.0)
    # |log rho| is some 1e-4 after thousands of terms a hundred times larger: float32 sums would be mostly noise
    total = active.new_zeros(num_sequences, dtype=torch.float64).index_add(0, sequence, active.double())
    mean = total / tokens_per_sequence(loss_mask, sequence, num_sequences)
    return torch.where(loss_mask, mean[sequence].to(log_ratio.dtype), 0.0)


def tokens_per_sequence(loss_mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Active tokens of each sequence: [S] float64, at least 1 because it is a denominator."""
    ones = loss_mask.to(torch.float64)
    return ones.new_zeros(num_sequences).index_add(0, sequence, ones).clamp(min=1.0)
