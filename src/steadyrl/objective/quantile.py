"""An exact order statistic."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor


def order_statistic(values: Tensor, loss_mask: Tensor, alpha: float) -> Tensor:
    """q = inf{ x : share of active values <= x is at least alpha } (paper, Eq. 14).

    This is the k-th smallest of the N active values, k = ceil(alpha * N). Nothing is interpolated:
    with an interpolated quantile, more than 1 - alpha of the values can lie above it.

    Args:
        values: [T], floating point.
        loss_mask: [T] bool.
        alpha: in (0, 1], taken as the decimal fraction it is written as.

    Returns:
        0-d, detached, dtype of `values`; 0 when no token is active.
    """
    active = values.detach()[loss_mask]
    if active.numel() == 0:
        return values.new_zeros(())
    # in floating point, 0.9 * N can land just above the integer it stands for, and k would be one too large
    share = Fraction(str(alpha))
    k = -(-share.numerator * active.numel() // share.denominator)
    return active.kthvalue(k).values
