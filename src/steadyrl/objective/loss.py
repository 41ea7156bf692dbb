"""The policy loss: the one place where ratio, boundary, correction, aggregation and penalty meet.

    loss = sum over active tokens of weight * ( -w m S + kl_coef * k3 + log_ratio_coef * d^2 )

w is the correction, m the rejection. S carries two things at once: the *value* is the textbook
surrogate, the *gradient* is coefficient * advantage * grad logp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadyrl.method import ObjectiveConfig, SatBoundary
from steadyrl.objective import boundary, mask_rules, soft_rules
from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.objective.correction import correction_weight
from steadyrl.objective.penalty import kl_k3
from steadyrl.objective.ratio import prox_approx_logp, token_log_ratio, unit_log_ratio, unit_slope
from steadyrl.objective.rejection import kept_tokens
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput
from steadyrl.types import BatchCounts, Sums

RULES: dict[str, Callable[[Any, RuleInput], BoundaryOutput]] = {
    "clip": boundary.clip,
    "band": mask_rules.band,
    "dppo": mask_rules.dppo,
    "ipo": mask_rules.ipo,
    "kpop": mask_rules.kpop,
    "m2po": mask_rules.m2po,
    "vaco": mask_rules.vaco,
    "trpo": mask_rules.trpo,
    "importance": soft_rules.importance,
    "cispo": soft_rules.cispo,
    "spo": soft_rules.spo,
    "drpo": soft_rules.drpo,
    "sapo": soft_rules.sapo,
    "vespo": soft_rules.vespo,
    "unbounded_positive": soft_rules.unbounded_positive,
    "topr": soft_rules.topr,
}  # "sat" is not among them: it also takes a quantile


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch, and what there is to say about it."""

    loss: Tensor  # 0-d; the losses of the micro-batches of a batch add up
    sums: Sums  # (sum, count), both 0-d float64 and detached
    extremes: dict[str, Tensor] = field(default_factory=dict)  # 0-d, detached; pooled by their minimum
    marks: dict[str, Tensor] = field(default_factory=dict)  # [T] bool: what the rule did to each token


def anchor_of(
    objective: ObjectiveConfig, logp: Tensor, behavior_logp: Tensor, old_logp: Tensor | None, age: Tensor | None
) -> Tensor:
    """The log-probabilities that ratios are taken against: [T], detached."""
    if objective.anchor == "rollout":
        return behavior_logp.detach()
    if objective.anchor == "prox_approx":
        assert age is not None, "the prox_approx anchor needs the age of every token"
        return prox_approx_logp(logp, behavior_logp, age)
    assert old_logp is not None, f"the {objective.anchor} anchor needs the log-probabilities of that policy"
    return old_logp.detach()


def trust_region_score(objective: ObjectiveConfig, logp: Tensor, anchor_logp: Tensor, layout: Layout) -> Tensor:
    """|log-ratio| in the objective's unit: what the quantile of SAT is taken over. [T], detached, 0 where masked."""
    return unit_log_ratio(objective.unit, logp.detach(), anchor_logp, layout).abs()


def policy_loss(
    objective: ObjectiveConfig,
    *,
    logp: Tensor,
    behavior_logp: Tensor,
    advantage: Tensor,
    layout: Layout,
    counts: BatchCounts,
    old_logp: Tensor | None = None,
    reference_logp: Tensor | None = None,
    age: Tensor | None = None,
    divergence: Tensor | None = None,
    quantile: Tensor | None = None,
) -> LossOutput:
    """The loss of one micro-batch of whole responses.

    Masked tokens may hold anything, NaN and inf included. Without an active token the loss is a 0
    that can still be differentiated.

    Args:
        objective: the point of the design space.
        logp: [T], the policy being trained; the only input that is differentiated.
        behavior_logp: [T], the engine that sampled.
        advantage: [T], the same for all tokens of a response unless `unit` is "token" or "sequence_token".
        layout: which tokens are trained on, and the response each belongs to.
        counts: active tokens and responses of the whole optimizer batch.
        old_logp: [T], the trainer's own log-probabilities for the anchors old_actor and step_start.
        reference_logp: [T]; when given, k3 towards it is added with weight `kl_coef`.
        age: [T] int64, lag of each token in optimizer steps, for the prox_approx anchor.
        divergence: [T], of the distribution each token was drawn from, for rules that need distributions.
        quantile: 0-d, q of SAT; None takes it over this micro-batch.
    """
    loss_mask = layout.loss_mask
    _check_shapes(loss_mask, logp=logp, behavior_logp=behavior_logp, advantage=advantage, sequence=layout.sequence)
    current = torch.where(loss_mask, logp.detach(), 0.0)
    anchor_logp = anchor_of(objective, logp.detach(), behavior_logp, old_logp, age)
    log_ratio = unit_log_ratio(objective.unit, current, anchor_logp, layout)
    advantage = torch.where(loss_mask, advantage.detach().to(log_ratio.dtype), 0.0)
    x = RuleInput(
        log_ratio=log_ratio,
        advantage=advantage,
        logp=current.to(log_ratio.dtype),
        anchor_logp=torch.where(loss_mask, anchor_logp, 0.0).to(log_ratio.dtype),
        layout=layout,
        divergence=None if divergence is None else torch.where(loss_mask, divergence.detach(), 0.0),
    )
    band, sums, extremes, marks = _boundary(objective, x, quantile)
    factor, factor_sums = _factor(objective, x, behavior_logp)
    sums |= _clip_sums(band, x) | factor_sums

    weight = aggregation_weight(objective, layout, counts).to(log_ratio.dtype)
    slope_of_unit = 1.0 if band.is_weight else unit_slope(objective.unit, layout).to(log_ratio.dtype)
    # zero in value, one in slope; the mask comes first, because NaN - NaN is not 0
    slope = token_log_ratio(logp, logp, loss_mask)
    surrogate = band.surrogate + band.coefficient * slope_of_unit * advantage * slope
    loss = -(weight * factor * surrogate).sum()

    if objective.log_ratio_coef > 0:
        drift = token_log_ratio(logp, anchor_logp, loss_mask)
        loss = loss + objective.log_ratio_coef * (weight * drift**2).sum()
        sums["penalty/log_ratio_squared"] = masked_sum(drift**2, loss_mask)
    if reference_logp is not None:
        penalty = kl_k3(logp, reference_logp, loss_mask)
        loss = loss + objective.kl_coef * (weight * penalty).sum()
        sums["penalty/kl_ref"] = masked_sum(penalty, loss_mask)
    return LossOutput(loss, sums, extremes, {"outside": band.outside, "removed": band.removed, **marks})


def _check_shapes(loss_mask: Tensor, **tensors: Tensor) -> None:
    """One flat stream of tokens: a [B, 1] among [B] would broadcast without a word."""
    for name, tensor in tensors.items():
        if tensor.shape != loss_mask.shape or tensor.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, loss_mask {tuple(loss_mask.shape)}: both must be [T], the tokens "
                "of all responses in one row; flatten [B, n] and repeat what belongs to a response for each of its tokens"
            )


def _boundary(
    objective: ObjectiveConfig, x: RuleInput, quantile: Tensor | None
) -> tuple[BoundaryOutput, Sums, dict[str, Tensor], dict[str, Tensor]]:
    """The rule of the objective on every token; statistics, extremes and marks that only this rule has."""
    rule = objective.boundary
    if not isinstance(rule, SatBoundary):
        return RULES[rule.rule](rule, x), {}, {}, {}
    q = boundary.sat_quantile(rule, x.log_ratio.abs(), x.layout) if quantile is None else quantile.detach()
    c_low, c_high = boundary.sat_contraction(rule, x.log_ratio, q)
    base = boundary.interval(x, rule.low, rule.high)
    assert base.radius_low is not None
    assert base.radius_high is not None
    band = boundary.interval(x, base.radius_low * c_low, base.radius_high * c_high)
    assert band.radius_low is not None
    assert band.radius_high is not None
    loss_mask = x.layout.loss_mask
    contraction = torch.minimum(c_low, c_high)
    count = loss_mask.sum(dtype=torch.float64)
    sums: Sums = {
        "sat/radius_low": masked_sum(band.radius_low, loss_mask),
        "sat/radius_high": masked_sum(band.radius_high, loss_mask),
        "sat/gate_rate": masked_sum(contraction < 1, loss_mask),
        "sat/intervention_rate": masked_sum(band.removed & ~base.removed, loss_mask),
        "sat/q": (q.double() * count, count),
    }
    # a leading 1 stands for "nothing contracted", also when there is no token at all
    strongest = torch.cat([contraction.new_ones(1), contraction[loss_mask]]).amin()
    marks = {"gated": contraction < 1, "intervened": band.removed & ~base.removed}
    return band, sums, {"sat/min_contraction": strongest}, marks


def _factor(objective: ObjectiveConfig, x: RuleInput, behavior_logp: Tensor) -> tuple[Tensor | float, Sums]:
    """Correction times rejection, [T] and detached. Rejected tokens stay in the denominators."""
    if objective.correction is None and not objective.reject:
        return 1.0, {}
    loss_mask = x.layout.loss_mask
    mismatch = token_log_ratio(x.anchor_logp, behavior_logp, loss_mask)
    factor, sums = torch.ones_like(x.log_ratio), {}
    if objective.correction is not None:
        factor = correction_weight(objective.correction, mismatch, x.layout)
        sums["correction/weight"] = masked_sum(factor, loss_mask)
        sums["correction/zero"] = masked_sum(factor == 0, loss_mask)
    policy = token_log_ratio(x.logp, x.anchor_logp, loss_mask)
    for rejection in objective.reject:
        kept = kept_tokens(rejection, policy, mismatch, x.advantage, x.layout)
        sums[f"rejection/{rejection.kind}"] = masked_sum(~kept, loss_mask)
        factor = torch.where(kept, factor, 0.0)
    return factor, sums


def _clip_sums(band: BoundaryOutput, x: RuleInput) -> Sums:
    """The statistics that every rule has; outside the band and gradient removed are two numbers, not one."""
    loss_mask = x.layout.loss_mask
    sums: Sums = {
        "objective/surrogate": masked_sum(band.surrogate, loss_mask),
        "objective/outside_band": masked_sum(band.outside, loss_mask),
        "objective/clip_low": masked_sum(band.removed_low, loss_mask),
        "objective/clip_high": masked_sum(band.removed_high, loss_mask),
    }
    low = x.log_ratio < 0
    sides = {"low": (band.outside & low, band.removed_low), "high": (band.outside & ~low, band.removed_high)}
    for sign, chosen in (("positive", x.advantage > 0), ("negative", x.advantage < 0)):
        for side, (outside, removed) in sides.items():
            sums[f"objective/outside_{side}_{sign}"] = masked_sum(outside & chosen, loss_mask)
            sums[f"objective/removed_{side}_{sign}"] = masked_sum(removed & chosen, loss_mask)
    return sums


def masked_sum(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over the active tokens, float64 and detached."""
    kept = torch.where(loss_mask, values.detach().to(torch.float64), 0.0)
    return kept.sum(), loss_mask.sum(dtype=torch.float64)
