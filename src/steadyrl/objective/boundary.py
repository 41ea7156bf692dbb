"""Trust-region rules: how much of each sampled token's gradient is kept, and where the surrogate saturates.

Both rules are an interval [1 - low, 1 + high] around ratio 1. Everything here is detached: a rule
steers the gradient and never carries one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BoundaryOutput:
    """What a rule says about every token; all [T] and detached."""

    surrogate: Tensor  # S, in the dtype of the log-ratio
    coefficient: Tensor  # the gradient of S is coefficient * advantage * grad logp
    radius_low: Tensor  # effective radii
    radius_high: Tensor
    outside: Tensor  # bool, the ratio is outside the band, whatever the advantage
    removed_low: Tensor  # bool, outward and outside at this side: the gradient is removed
    removed_high: Tensor  # bool

    @property
    def removed(self) -> Tensor:
        return self.removed_low | self.removed_high


def clip_boundary(log_ratio: Tensor, advantage: Tensor, low: Tensor | float, high: Tensor | float) -> BoundaryOutput:
    """PPO: S = min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio) (arXiv 1707.06347, Eq. 7).

    The gradient of S is r A grad logp, except where r is strictly outside the band *and* A pushes it
    further out; there it is 0. Pull-back gradients are kept.

    Args:
        log_ratio: [T].
        advantage: [T].
        low, high: radii, numbers or [T].
    """
    ratio = log_ratio.detach().exp()
    advantage = advantage.detach().to(ratio.dtype)
    # numbers become tensors before the arithmetic: 1 - low must round the same way for both kinds of radii
    radius_low = torch.as_tensor(low, dtype=ratio.dtype, device=ratio.device).detach().expand_as(ratio)
    radius_high = torch.as_tensor(high, dtype=ratio.dtype, device=ratio.device).detach().expand_as(ratio)
    lower, upper = 1.0 - radius_low, 1.0 + radius_high
    below, above = ratio < lower, ratio > upper
    removed_low, removed_high = below & (advantage < 0), above & (advantage > 0)
    return BoundaryOutput(
        surrogate=torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage),
        coefficient=torch.where(removed_low | removed_high, 0.0, ratio),
        radius_low=radius_low,
        radius_high=radius_high,
        outside=below | above,
        removed_low=removed_low,
        removed_high=removed_high,
    )


def sat_contraction(log_ratio: Tensor, q: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """The factors (c_low, c_high) that SAT puts on the radii of the drifted tail (paper, Eq. 15-16).

        c = 1 / (1 + (|d| / q)^exponent)   if q > 0 and |d| > q, on the side of the sign of d;   1 otherwise

    The gate is strict and c jumps there, from 1 to just below 1/2.

    Args:
        log_ratio: [T].
        q: 0-d, the quantile of |d|; 0 turns the gate off.
        exponent: of the Hill kernel.

    Returns:
        Two [T] in the dtype of `log_ratio`, detached.
    """
    drift = log_ratio.detach()
    q = q.detach().to(drift.dtype)
    size = drift.abs()
    gated = (q > 0) & (size > q)
    kernel = 1.0 / (1.0 + (size / q) ** exponent)  # without meaning where q is 0, and not used there
    c_low = torch.where(gated & (drift < 0), kernel, 1.0)
    c_high = torch.where(gated & (drift > 0), kernel, 1.0)
    return c_low, c_high
