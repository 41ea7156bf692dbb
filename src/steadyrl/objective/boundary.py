"""Intervals around ratio 1: the clip of PPO, and SAT, which shrinks its radii.

Everything here is detached: a rule steers the gradient and never carries one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steadyrl.axes import ClipBoundary, SatBoundary
from steadyrl.objective.quantile import order_statistic_across
from steadyrl.objective.ratio import saturated_ratio, tokens_per_sequence
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput

LAG_BUCKETS = 16
AllReduce = Callable[[Tensor], Tensor]


def _alone(counts: Tensor) -> Tensor:
    """The sum over the ranks where there is one."""
    return counts


def interval(x: RuleInput, low: Tensor | float, high: Tensor | float) -> BoundaryOutput:
    """PPO: S = min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio) (arXiv 1707.06347, Eq. 7).

    The gradient of S is r A grad logp, except where r is strictly outside the band *and* A pushes it
    further out; there it is 0. Pull-back gradients are kept.

    Args:
        x: what the rule may look at.
        low, high: radii, numbers or [T].
    """
    ratio = saturated_ratio(x.log_ratio)
    advantage = x.advantage.detach()
    # numbers become tensors before the arithmetic: 1 - low must round the same way for both kinds of radii
    radius_low = torch.as_tensor(low, dtype=ratio.dtype, device=ratio.device).detach().expand_as(ratio)
    radius_high = torch.as_tensor(high, dtype=ratio.dtype, device=ratio.device).detach().expand_as(ratio)
    lower, upper = 1.0 - radius_low, 1.0 + radius_high
    below, above = ratio < lower, ratio > upper
    removed_low, removed_high = below & (advantage < 0), above & (advantage > 0)
    return BoundaryOutput(
        surrogate=torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage),
        coefficient=torch.where(removed_low | removed_high, 0.0, ratio),
        outside=below | above,
        removed_low=removed_low,
        removed_high=removed_high,
        radius_low=radius_low,
        radius_high=radius_high,
    )


def clip(rule: ClipBoundary, x: RuleInput) -> BoundaryOutput:
    """PPO's clip with fixed radii, and dual clip (arXiv 1912.09729, Eq. 5) if `dual` = c is set.

        A < 0:   S = max( min(r A, clip(r, 1 - low, 1 + high) A), c A )

    For A < 0 the plain surrogate falls without bound as r grows; dual clip holds it at c A and removes
    the gradient where r > c. For A > 0 it does nothing.
    """
    plain = interval(x, rule.low, rule.high)
    if rule.dual is None:
        return plain
    advantage = x.advantage.detach()
    beyond = (advantage < 0) & (saturated_ratio(x.log_ratio) > rule.dual)
    return BoundaryOutput(
        surrogate=torch.where(beyond, rule.dual * advantage, plain.surrogate),
        coefficient=torch.where(beyond, 0.0, plain.coefficient),
        outside=plain.outside | beyond,
        removed_low=plain.removed_low,
        removed_high=plain.removed_high | beyond,
        radius_low=plain.radius_low,
        radius_high=plain.radius_high,
    )


def sat_contraction(rule: SatBoundary, log_ratio: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The factors (c_low, c_high) that SAT puts on the radii of the drifted tail (arXiv 2607.18722, Eq. 15-16).

        c = kernel(|d| / q)   if q > 0 and |d| > q, on the side of the sign of d;   1 otherwise

    The gate is strict. With v = |d| / q > 1, p = `exponent` and kappa = `strength`, the kernels are

        hill             1 / (1 + v^p)           the paper's, p = 2; jumps from 1 to 1/2 at the gate
        exp              exp(-kappa v)           our variant
        exp_continuous   exp(-kappa (v - 1))     our variant; 1 at the gate
        gauss            exp(-v^2 ln 2)          our variant; 1/2 at the gate
        power            v^-p                    our variant; 1 at the gate
        shifted_hill     1 / (1 + (v - 1)^p)     our variant; 1 at the gate
        const            kappa                   our variant
        zero             0                       our variant: an outward hard mask on the tail

    All but `zero` keep what Prop. 4.1 needs: 0 < c <= 1, and c does not increase with |d|.

    Args:
        rule: the kernel and its parameters.
        log_ratio: [T].
        q: the quantile of |d|, 0-d or [T]; 0 turns the gate off.

    Returns:
        Two [T] in the dtype of `log_ratio`, detached.
    """
    drift = log_ratio.detach()
    q = q.detach().to(drift.dtype)
    size = drift.abs()
    gated = (q > 0) & (size > q)
    kernel = _kernel(rule, size / q)  # without meaning where q is 0, and not used there
    c_low = torch.where(gated & (drift < 0), kernel, 1.0)
    c_high = torch.where(gated & (drift > 0), kernel, 1.0)
    return c_low, c_high


@dataclass(frozen=True)
class SatOutput:
    """SAT's answer, and what it did to the tail; [N] are the N gated tokens."""

    band: BoundaryOutput
    gated: Tensor  # [T] bool
    intervened: Tensor  # [T] bool, the gradient is removed and the base would have kept it
    c_low: Tensor  # [N]
    c_high: Tensor  # [N]


def sat(rule: SatBoundary, x: RuleInput, size: Tensor, q: Tensor) -> SatOutput:
    """The base clip everywhere, and on the drifted tail again with contracted radii (arXiv 2607.18722, Eq. 17-19).

    Only the gated tokens, at most 1 - alpha of all, are looked at twice; without any the answer is the
    base's, bit for bit.

    Args:
        x: what the rule may look at.
        size: [T], |log_ratio|.
        q: its quantile, 0-d, or [T] where tokens are compared with different ones.
    """
    base = interval(x, rule.low, rule.high)
    # q = 0 turns the gate off; a masked token has size 0 and is never gated
    gated = size > torch.where(q > 0, q, torch.inf).to(size.dtype)
    tail = gated.nonzero().squeeze(1)
    log_ratio, advantage = x.log_ratio[tail], x.advantage[tail]
    c_low, c_high = sat_contraction(rule, log_ratio, q[tail] if q.dim() else q)
    part = replace(x, log_ratio=log_ratio, advantage=advantage)
    narrow = interval(part, rule.low * c_low, rule.high * c_high)
    kept_by_base = ~(base.removed_low[tail] | base.removed_high[tail])
    for name in ("surrogate", "coefficient", "outside", "removed_low", "removed_high"):
        getattr(base, name).index_copy_(0, tail, getattr(narrow, name))  # its own tensors, which nobody else holds
    intervened = torch.zeros_like(gated).index_copy_(0, tail, narrow.removed & kept_by_base)
    return SatOutput(replace(base, radius_low=None, radius_high=None), gated, intervened, c_low, c_high)


def _kernel(rule: SatBoundary, v: Tensor) -> Tensor:
    """The kernel at v = |d| / q."""
    p, kappa = rule.exponent, rule.strength
    match rule.kernel:
        case "hill":
            return 1.0 / (1.0 + v**p)
        case "exp":
            return torch.exp(-kappa * v)
        case "exp_continuous":
            return torch.exp(-kappa * (v - 1.0))
        case "gauss":
            return torch.exp(-math.log(2.0) * v**2)
        case "power":
            return v**-p
        case "shifted_hill":
            # below the gate it is not used, and a negative base would be NaN there
            return 1.0 / (1.0 + (v - 1.0).clamp(min=0.0) ** p)
        case "const":
            return torch.full_like(v, kappa)
        case "zero":
            return torch.zeros_like(v)


def lag_bucket(age: Tensor) -> Tensor:
    """The bucket of each lag, int64: 0, 1, 2-3, 4-7, ..., 2^13-2^14-1, and all above.

    Args:
        age: lags in optimizer steps, not negative.
    """
    powers = 2 ** torch.arange(LAG_BUCKETS - 1, device=age.device)
    return torch.bucketize(age, powers, right=True)


def sat_quantiles_by_lag(
    rule: SatBoundary, scores: Tensor, layout: Layout, age: Tensor, all_reduce: AllReduce = _alone
) -> Tensor:
    """`sat_quantile` of the tokens of each lag bucket alone (our variant): [LAG_BUCKETS], 0 for an empty one."""
    bucket = lag_bucket(age)
    tokens = all_reduce(torch.bincount(bucket[layout.loss_mask], minlength=LAG_BUCKETS))
    parts = [
        sat_quantile(rule, scores, replace(layout, loss_mask=layout.loss_mask & (bucket == index)), all_reduce)
        if count
        else scores.new_zeros(())
        for index, count in enumerate(tokens.tolist())
    ]
    return torch.stack(parts).detach()


def sat_quantile(rule: SatBoundary, scores: Tensor, layout: Layout, all_reduce: AllReduce = _alone) -> Tensor:
    """q, the alpha-quantile of the scores |d| of the active tokens (arXiv 2607.18722, Eq. 14).

        token       inf{ x : share of active tokens with score <= x is at least alpha }
        response    inf{ x : mean over responses of n_b(x) / T_b is at least alpha },
                    n_b(x) = active tokens of response b with score <= x, T_b = all of them    (our variant)

    Both are one of the scores: nothing is interpolated. With `token` a response counts T_b times, with
    `response` once whatever its length; a response without an active token does not count.

    Args:
        all_reduce: the sum over the ranks that share the batch, see `order_statistic_across`; every rank has to call
            this, and no response may be on two of them.

    Returns:
        0-d, detached, dtype of `scores`; 0 when no token is active.
    """
    weights = None
    if rule.quantile_weight == "response":
        lengths = tokens_per_sequence(layout.loss_mask, layout.sequence, layout.num_sequences)
        weights = 1.0 / lengths[layout.sequence]
    return order_statistic_across(scores, layout.loss_mask, rule.alpha, all_reduce, weights)


def policy_gradient(weight: Tensor, x: RuleInput) -> Tensor:
    """The value w A logp of a policy gradient with the detached weight w; 0 where w A is, also if logp is -inf."""
    factor = weight * x.advantage.detach()
    return torch.where(factor == 0, 0.0, factor * x.logp.detach())
