"""How far the policy being trained is from the policy that sampled, in log-probability.

delta = logp - behavior_logp, over active tokens; it holds the drift of the policy as well as the
numerics of the engine. Statistics are (sum, count) in float64, to be pooled before they are divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.types import Sums

TAILS = (0.1, 0.5)  # thresholds on |delta|


def mismatch_sums(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Sums:
    """Moments, divergences and tails of delta.

        mismatch/d_bar           mean |delta|, the drift measure of the paper
        mismatch/delta           mean delta
        mismatch/delta_squared   mean delta^2; with the mean it gives the variance
        mismatch/k1              mean -delta, estimates KL(behavior || policy), can be negative
        mismatch/k3              mean e^delta - 1 - delta, estimates the same, never negative
        mismatch/tail_X          share of tokens with |delta| > X

    Args:
        logp: [T], floating point.
        behavior_logp: [T], floating point.
        loss_mask: [T] bool; masked tokens may hold anything.
    """
    delta = _delta(logp, behavior_logp, loss_mask)
    size = delta.abs()
    values = {
        "mismatch/d_bar": size,
        "mismatch/delta": delta,
        "mismatch/delta_squared": delta.square(),
        "mismatch/k1": -delta,
        "mismatch/k3": torch.expm1(delta) - delta,
    }
    for threshold in TAILS:
        values[f"mismatch/tail_{threshold}"] = (size > threshold).to(torch.float64)
    count = loss_mask.sum(dtype=torch.float64)
    return {name: (value.sum(), count) for name, value in values.items()}  # each of them is 0 where delta is 0


def max_abs(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Tensor:
    """The largest |delta| of an active token: 0-d float64, 0 when there is none."""
    delta = _delta(logp, behavior_logp, loss_mask)
    return torch.cat([delta.new_zeros(1), delta.abs()]).amax()


def _delta(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] float64, detached, 0 where masked."""
    difference = logp.detach().to(torch.float64) - behavior_logp.detach().to(torch.float64)
    return torch.where(loss_mask, difference, 0.0)
