"""Rules without a hard mask: weights that are truncated, and surrogates that fade or turn around.

r is the ratio of the objective's unit. Everything here is detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.axes import (
    CispoBoundary,
    DrpoBoundary,
    ImportanceBoundary,
    SapoBoundary,
    SpoBoundary,
    ToprBoundary,
    UnboundedPositiveBoundary,
    VespoBoundary,
)
from steadyrl.objective.boundary import interval, policy_gradient
from steadyrl.objective.ratio import saturated_log_ratio, saturated_ratio
from steadyrl.objective.rule import BoundaryOutput, RuleInput


def importance(rule: ImportanceBoundary, x: RuleInput) -> BoundaryOutput:
    """The policy gradient: S = w A logp, w = min(r, cap); w = 1 if not `weighted` (REINFORCE).

    Without a cap this is exact importance sampling; with one, TIS as a policy gradient
    (arXiv 2607.18722, Eq. 41).
    """
    ratio = saturated_ratio(x.log_ratio)
    if not rule.weighted:
        return _soft(x, torch.ones_like(ratio))
    if rule.cap is None:
        return _soft(x, ratio)
    return _soft(x, ratio.clamp(max=rule.cap), outside=ratio > rule.cap)


def cispo(rule: CispoBoundary, x: RuleInput) -> BoundaryOutput:
    """CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4-5): S = clip(r, 1 - low, 1 + high) A logp.

    The weight is clipped and the gradient never vanishes. low >= 1 is no lower bound; with low < 1 the
    bound raises the weight of the smallest ratios.
    """
    ratio = saturated_ratio(x.log_ratio)
    lower, upper = 1.0 - rule.low, 1.0 + rule.high
    return _soft(x, ratio.clamp(lower, upper), outside=(ratio < lower) | (ratio > upper))


def spo(rule: SpoBoundary, x: RuleInput) -> BoundaryOutput:
    """SPO (arXiv 2401.16025; arXiv 2607.18722, Eq. 48): S = r A - |A| / (2 eps) (r - 1)^2.

    coefficient = r (1 - sign(A) (r - 1) / eps); the optimum is r = 1 + sign(A) eps, and beyond it the
    gradient points back.
    """
    ratio, advantage = saturated_ratio(x.log_ratio), x.advantage
    gap = ratio - 1.0
    return _surrogate(
        surrogate=ratio * advantage - advantage.abs() / (2.0 * rule.eps) * gap**2,
        coefficient=ratio * (1.0 - advantage.sign() * gap / rule.eps),
        outside=gap.abs() > rule.eps,
    )


def drpo(rule: DrpoBoundary, x: RuleInput) -> BoundaryOutput:
    """DRPO (arXiv 2606.09821; arXiv 2607.18722, Eq. 49): S = r A - |A| / (2 delta) p0 (r - 1)^2.

    coefficient = r (1 - sign(A) (p - p0) / delta), because p0 (r - 1) = p - p0; the optimum is
    p = p0 + sign(A) delta. The default of delta is ours.
    """
    ratio, advantage = saturated_ratio(x.log_ratio), x.advantage
    # p0 r from the logarithms: with the held ratio, a token that the anchor all but excludes would seem not to move
    moved = torch.where(x.anchor_logp.isinf(), x.logp, x.anchor_logp + x.log_ratio)
    gap = saturated_ratio(moved) - x.anchor_logp.exp()
    return _surrogate(
        surrogate=ratio * advantage - advantage.abs() / (2.0 * rule.delta) * gap * (ratio - 1.0),
        coefficient=ratio * (1.0 - advantage.sign() * gap / rule.delta),
        outside=gap.abs() > rule.delta,
    )


def sapo(rule: SapoBoundary, x: RuleInput) -> BoundaryOutput:
    """SAPO (arXiv 2511.20347): S = (4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    coefficient = 4 s (1 - s) r with s = sigmoid(tau (r - 1)): r at ratio 1, and fading on both sides of it.
    """
    ratio = saturated_ratio(x.log_ratio)
    tau = _by_sign(x, rule.tau_positive, rule.tau_negative, x.advantage > 0)
    z = tau * (ratio - 1.0)
    return _surrogate(
        surrogate=4.0 / tau * torch.sigmoid(z) * x.advantage,
        coefficient=4.0 * torch.sigmoid(z) * torch.sigmoid(-z) * ratio,
    )


def vespo(rule: VespoBoundary, x: RuleInput) -> BoundaryOutput:
    """VESPO (arXiv 2602.10693): S = phi(W) A logp, phi(W) = W^k exp(lambda (1 - W)), k and lambda by the sign of A.

    W is the ratio of the objective's unit, in the paper the product over the response. phi(1) = 1 and
    phi is largest at W = k / lambda. The numbers are those of the published code.
    """
    log_w = saturated_log_ratio(x.log_ratio)
    positive = x.advantage >= 0
    k = _by_sign(x, rule.k_positive, rule.k_negative, positive)
    lam = _by_sign(x, rule.lambda_positive, rule.lambda_negative, positive)
    # one exponent: W^k alone may overflow where phi is 0
    return _soft(x, saturated_ratio(k * log_w + lam * (1.0 - log_w.exp())))


def unbounded_positive(rule: UnboundedPositiveBoundary, x: RuleInput) -> BoundaryOutput:
    """Unbounded positive (arXiv 2607.06987): A > 0: S = pi / sg[pi] A;  A < 0: PPO's clip.

    The value for A > 0 is A, the gradient A grad logp. Our variant in the details: the source was
    known to us by the rule's description.
    """
    clipped = interval(x, rule.low, rule.high)
    positive = x.advantage > 0
    return BoundaryOutput(
        surrogate=torch.where(positive, x.advantage, clipped.surrogate),
        coefficient=torch.where(positive, 1.0, clipped.coefficient),
        outside=clipped.outside & ~positive,
        removed_low=clipped.removed_low & ~positive,
        removed_high=clipped.removed_high & ~positive,
    )


def topr(rule: ToprBoundary, x: RuleInput) -> BoundaryOutput:
    """TOPR (arXiv 2503.14286): S = w A logp; A > 0: w = 1;  A <= 0: w = min(r, 1).

    Our variant in the unit: r is the ratio of the objective's unit, the numbers of the truncation are
    our reading.
    """
    ratio = saturated_ratio(x.log_ratio)
    positive = x.advantage > 0
    weight = torch.where(positive, 1.0, ratio.clamp(max=1.0))
    return _soft(x, weight, outside=(ratio > 1.0) & (x.advantage < 0))


def _by_sign(x: RuleInput, positive: float, negative: float, where: Tensor) -> Tensor:
    """One number where `where` holds, another elsewhere, in the dtype of the ratios."""
    one = torch.ones_like(x.log_ratio)
    return torch.where(where, positive * one, negative * one)


def _soft(x: RuleInput, weight: Tensor, outside: Tensor | None = None) -> BoundaryOutput:
    """S = w A logp; no gradient is ever removed."""
    return _surrogate(policy_gradient(weight, x), weight, outside, is_weight=True)


def _surrogate(
    surrogate: Tensor, coefficient: Tensor, outside: Tensor | None = None, is_weight: bool = False
) -> BoundaryOutput:
    none = torch.zeros_like(coefficient, dtype=torch.bool)
    return BoundaryOutput(
        surrogate=surrogate,
        coefficient=coefficient,
        outside=none if outside is None else outside,
        removed_low=none,
        removed_high=none,
        is_weight=is_weight,
    )
