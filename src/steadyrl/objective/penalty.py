"""Penalties that are added to the policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.objective.ratio import token_log_ratio


def kl_k3(logp: Tensor, reference_logp: Tensor, loss_mask: Tensor) -> Tensor:
    """k3 = e^x - 1 - x with x = reference_logp - logp, an estimate of KL(policy || reference), per token.

    http://joschu.net/blog/kl-approx.html; the gradient goes through `logp` alone.

    Args:
        logp: [T], floating point.
        reference_logp: [T], floating point.
        loss_mask: [T] bool.

    Returns:
        [T] float32 (float64 if an input is), >= 0, 0 where masked.
    """
    log_ratio = -token_log_ratio(logp, reference_logp, loss_mask)
    # exp(x) - 1 - x would lose small values to rounding, and some of them would come out negative
    return torch.expm1(log_ratio) - log_ratio
