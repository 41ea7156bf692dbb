"""Hard masks on single tokens: a token counts with its importance weight, or not at all.

r is the ratio of the objective's unit, p and p0 are the token's probabilities under the policy being
trained and under the anchor, M is 1 on the tokens that are kept. Two forms occur:

    policy gradient   S = M w A logp     gradient M w A grad logp    (w detached)
    ratio             S = M r A          gradient M r A grad log r

Everything here is detached.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steadyrl.axes import (
    BandBoundary,
    DppoBoundary,
    IpoBoundary,
    KpopBoundary,
    M2poBoundary,
    TrpoBoundary,
    VacoBoundary,
)
from steadyrl.objective.boundary import interval, policy_gradient
from steadyrl.objective.ratio import saturated_ratio
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput


def band(rule: BandBoundary, x: RuleInput) -> BoundaryOutput:
    """DIS, double-sided masking (SAO, arXiv 2607.07508): S = f(r) A logp.

        f(r) = r   if 1 - low < r < 1 + high;   0 otherwise

    Both sides are masked whatever the sign of A. Our variant in one respect: that f is detached is our
    reading of the loss.
    """
    ratio = saturated_ratio(x.log_ratio)
    outside = (ratio <= 1.0 - rule.low) | (ratio >= 1.0 + rule.high)
    return _weighted(x, outside, outside, ratio)


def dppo(rule: DppoBoundary, x: RuleInput) -> BoundaryOutput:
    """DPPO (arXiv 2602.04879): S = M min(r, cap) A logp; outward tokens far from the anchor are dropped.

        tv                  A > 0: p - p0 > high              A < 0: p - p0 < -low
        kl                  A > 0: KL > high and p > p0       A < 0: KL > low and p < p0
        topk_tv, topk_kl    the same with the divergence D_K of the K tokens that the engine kept (x.divergence)

    KL = p0 log(p0 / p) + (1 - p0) log((1 - p0) / (1 - p)), of the token against all others.

    With `clip` = eps the mask multiplies PPO's surrogate instead, S = M min(r A, clip(r, 1 - eps, 1 + eps) A),
    as in the baseline of the SAT paper (arXiv 2607.18722, App. F).
    """
    above, below = _dppo_sides(rule, x)
    advantage = x.advantage
    dropped = (above & (advantage > 0)) | (below & (advantage < 0))
    outside = above | below
    if rule.clip is None:
        return _weighted(x, dropped, outside, saturated_ratio(x.log_ratio).clamp(max=rule.cap))
    clipped = interval(x, rule.clip, rule.clip)
    removed_low, removed_high = _sides(x, dropped)
    return BoundaryOutput(
        surrogate=torch.where(dropped, 0.0, clipped.surrogate),
        coefficient=torch.where(dropped, 0.0, clipped.coefficient),
        outside=outside | clipped.outside,
        removed_low=removed_low | clipped.removed_low,
        removed_high=removed_high | clipped.removed_high,
        radius_low=clipped.radius_low,
        radius_high=clipped.radius_high,
    )


def ipo(rule: IpoBoundary, x: RuleInput) -> BoundaryOutput:
    """IPO (prime-rl): S = M r A, M = 0 where |p - p0| > threshold, whatever the sign of A."""
    outside = (x.logp.exp() - x.anchor_logp.exp()).abs() > rule.threshold
    return _ratio(x, outside, outside)


def kpop(rule: KpopBoundary, x: RuleInput) -> BoundaryOutput:
    """KPop (prime-rl): S = M r A, M = 1 where KL(p || p0) <= phi and KL(p0 || p) <= phi.

    KL is that of two coins, p log(p / p0) + (1 - p) log((1 - p) / (1 - p0)), with p and p0 clamped to
    [1e-6, 1 - 1e-6]. Both sides are masked whatever the sign of A.
    """
    p = x.logp.exp().clamp(1e-6, 1.0 - 1e-6)
    p0 = x.anchor_logp.exp().clamp(1e-6, 1.0 - 1e-6)
    kept = (_coin_kl(p, p0) <= rule.phi) & (_coin_kl(p0, p) <= rule.phi)
    return _ratio(x, ~kept, ~kept)


def m2po_limit(
    rule: M2poBoundary, size: Tensor, layout: Layout, all_reduce: Callable[[Tensor], Tensor] = lambda total: total
) -> Tensor:
    """A bound on |log r|, 0-d in the dtype of `size` = |log r| [T]: M2PO keeps what does not exceed it (2510.01161).

    The largest (log r)^2 are dropped until the mean of the rest is below the budget. At least the smallest is
    kept. Our variant in one respect: tokens of one size are kept or dropped together, so that the answer does
    not depend on their order.

    The mean of the tokens up to a bound grows with the bound, so the bound is found by bisection over the
    floating-point numbers. The same one comes out on every rank.

    Args:
        all_reduce: the sum over the ranks of a float64 tensor of 2 numbers, called twice per bit of the dtype.
    """
    integer, bits = (torch.int32, 31) if size.dtype == torch.float32 else (torch.int64, 63)
    active = size.detach()[layout.loss_mask]
    infinity = int(torch.tensor(torch.inf, dtype=size.dtype).view(integer))  # images beyond it are no numbers

    def bound(image: int) -> Tensor:
        return torch.tensor(image, dtype=integer, device=size.device).view(size.dtype)

    def up_to(image: int) -> tuple[float, float]:
        kept = active[active <= bound(image)].double()
        number, total = all_reduce(torch.stack([kept.new_tensor(float(len(kept))), kept.square().sum()])).tolist()
        return number, total

    def largest(holds: Callable[[float, float], bool]) -> int:
        """The image of the largest number whose tokens satisfy a condition that holds up to some point."""
        image = 0
        for bit in reversed(range(bits)):
            if image | 1 << bit <= infinity and holds(*up_to(image | 1 << bit)):
                image |= 1 << bit
        return image

    below_budget = largest(lambda number, total: total < rule.budget * number or number == 0)
    if up_to(below_budget)[0] > 0:
        return bound(below_budget)
    return bound(min(largest(lambda number, _total: number == 0) + 1, infinity))  # the smallest there is


def m2po(rule: M2poBoundary, x: RuleInput) -> BoundaryOutput:
    """M2PO (arXiv 2510.01161): S = M r A, M = 0 where |log r| exceeds `m2po_limit`.

    The limit is taken over this micro-batch unless the input carries that of the whole batch.
    """
    size = x.log_ratio.detach().abs()
    limit = m2po_limit(rule, size, x.layout) if x.threshold is None else x.threshold
    outside = x.layout.loss_mask & ~(size <= limit)
    return _ratio(x, outside, outside)


def vaco(rule: VacoBoundary, x: RuleInput) -> BoundaryOutput:
    """VACO's mask (arXiv 2603.01365): S = M min(r, cap) A logp, M = 0 where |r - 1| > bound and A log r > 0.

    Our variant: the form that language-model trainers use, without VACO's realigned advantages, and
    with bounds of our own, because none are published.
    """
    ratio = saturated_ratio(x.log_ratio)
    outside = (ratio - 1.0).abs() > rule.bound
    return _weighted(x, outside & _outward(x), outside, ratio.clamp(max=rule.cap))


def trpo(rule: TrpoBoundary, x: RuleInput) -> BoundaryOutput:
    """A state-wise gate: S = M r A, M = 0 where D_TV(anchor, policy)[state] > delta and A log r > 0.

    Our variant: TRPO (arXiv 1502.05477) bounds the divergence of the whole policy; this takes the
    bound to each state that was visited, where the exact divergence is known (x.divergence).
    """
    assert x.divergence is not None, "the trpo rule needs the divergence of every state"
    outside = x.divergence > rule.delta
    return _ratio(x, outside & _outward(x), outside)


def _dppo_sides(rule: DppoBoundary, x: RuleInput) -> tuple[Tensor, Tensor]:
    """Where the divergence exceeds its threshold: upwards (p > p0), downwards."""
    if rule.divergence == "tv":
        gap = x.logp.exp() - x.anchor_logp.exp()
        return gap > rule.high, gap < -rule.low
    if rule.divergence == "kl":
        divergence = _kl_against_rest(x.anchor_logp, x.logp)
    else:
        assert x.divergence is not None, f"the divergence {rule.divergence} needs the distributions"
        divergence = x.divergence
    return (divergence > rule.high) & (x.logp > x.anchor_logp), (divergence > rule.low) & (x.logp < x.anchor_logp)


def _kl_against_rest(logp0: Tensor, logp: Tensor) -> Tensor:
    """KL of a token against all others, p0 first; the 1e-8 are those of the published code."""
    p0 = logp0.exp()
    # expm1 keeps 1 - p where p is nearly 1; rounding may have pushed a log-probability above 0
    rest0, rest = -torch.expm1(logp0.clamp(max=0.0)), -torch.expm1(logp.clamp(max=0.0))
    token = torch.where(p0 > 0, p0 * (logp0 - logp), 0.0)  # 0 log 0 = 0
    return token + rest0 * torch.log((rest0 + 1e-8) / (rest + 1e-8))


def _coin_kl(p: Tensor, p0: Tensor) -> Tensor:
    return p * torch.log(p / p0) + (1.0 - p) * torch.log((1.0 - p) / (1.0 - p0))


def _outward(x: RuleInput) -> Tensor:
    """Where the update would move the ratio further from 1."""
    return ((x.advantage > 0) & (x.log_ratio > 0)) | ((x.advantage < 0) & (x.log_ratio < 0))


def _sides(x: RuleInput, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that lose a gradient, with a ratio below 1 and with one above. Without advantage there is none."""
    removed = dropped & (x.advantage != 0)
    return removed & (x.log_ratio < 0), removed & (x.log_ratio >= 0)


def _weighted(x: RuleInput, dropped: Tensor, outside: Tensor, weight: Tensor) -> BoundaryOutput:
    """S = M w A logp."""
    coefficient = torch.where(dropped, 0.0, weight)
    removed_low, removed_high = _sides(x, dropped)
    return BoundaryOutput(
        surrogate=policy_gradient(coefficient, x),
        coefficient=coefficient,
        outside=outside,
        removed_low=removed_low,
        removed_high=removed_high,
        is_weight=True,
    )


def _ratio(x: RuleInput, dropped: Tensor, outside: Tensor) -> BoundaryOutput:
    """S = M r A."""
    coefficient = torch.where(dropped, 0.0, saturated_ratio(x.log_ratio))
    removed_low, removed_high = _sides(x, dropped)
    return BoundaryOutput(
        surrogate=coefficient * x.advantage,
        coefficient=coefficient,
        outside=outside,
        removed_low=removed_low,
        removed_high=removed_high,
    )
