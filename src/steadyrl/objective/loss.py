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

from steadyrl.axes import M2poBoundary, SatBoundary
from steadyrl.method import ObjectiveConfig
from steadyrl.objective import boundary, mask_rules, soft_rules
from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.objective.correction import correction_weight
from steadyrl.objective.penalty import kl_k3
from steadyrl.objective.ratio import (
    prox_approx_logp,
    sequence_log_ratio,
    token_log_ratio,
    unit_log_ratio,
    unit_slope,
)
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
    """|log-ratio| in the objective's unit: what thresholds are taken over. [T], detached, 0 where masked."""
    return unit_log_ratio(objective.unit, logp.detach(), anchor_logp, layout).abs()


def batch_threshold(
    objective: ObjectiveConfig,
    score: Tensor,
    layout: Layout,
    age: Tensor | None = None,
    all_reduce: Callable[[Tensor], Tensor] = lambda part: part,
) -> Tensor | None:
    """What a rule that is relative to the batch takes from all its scores: q of SAT, the limit of M2PO.

    Args:
        score: [T] of the whole optimizer batch, or of this rank's share of it, from `trust_region_score`.
        layout: of the same tokens.
        age: [T] int64, lag of each token, for `quantile_scope = "lag"`.
        all_reduce: the sum over the ranks that share the batch; each has to call this, one without tokens too.

    Returns:
        For `policy_loss`: 0-d, or [LAG_BUCKETS] for `quantile_scope = "lag"`. None for a rule that looks at one
        token, or at its micro-batch on purpose.
    """
    rule = objective.boundary
    if isinstance(rule, SatBoundary) and rule.quantile_scope == "lag":
        assert age is not None, "a quantile for each lag needs the lag of every token"
        return boundary.sat_quantiles_by_lag(rule, score, layout, age, all_reduce)
    if isinstance(rule, SatBoundary) and rule.quantile_scope != "microbatch":
        return boundary.sat_quantile(rule, score, layout, all_reduce)
    if isinstance(rule, M2poBoundary):
        return mask_rules.m2po_limit(rule, score, layout, all_reduce)
    return None


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
    threshold: Tensor | None = None,
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
        age: [T] int64, lag of each token in optimizer steps, for the prox_approx anchor and for
            `quantile_scope = "lag"`.
        divergence: [T], of the distribution each token was drawn from, for rules that need distributions.
        threshold: from `batch_threshold`; None takes it over this micro-batch.
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
        threshold=None if threshold is None else threshold.detach(),
    )
    band, sums, extremes, marks = _boundary(objective, x, age)
    factor, factor_sums = _factor(objective, x, behavior_logp)
    sums |= _clip_sums(band, x) | factor_sums

    weight = aggregation_weight(objective, layout, counts).to(log_ratio.dtype)
    slope_of_unit = 1.0 if band.is_weight else unit_slope(objective.unit, layout).to(log_ratio.dtype)
    # zero in value, one in slope; the mask comes first, because NaN - NaN is not 0
    slope = token_log_ratio(logp, logp, loss_mask)
    gradient = band.coefficient * slope_of_unit * advantage * slope
    if objective.unit in ("sequence", "product") and not band.is_weight and isinstance(factor, Tensor):
        # every token carries the gradient of the response's one ratio, so the weights of all its tokens act on each
        shared = sequence_log_ratio(factor, loss_mask, layout.sequence, layout.num_sequences)
        loss = -(weight * (factor * band.surrogate + shared * gradient)).sum()
    else:
        loss = -(weight * factor * (band.surrogate + gradient)).sum()

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
                f"{name} has shape {tuple(tensor.shape)}, loss_mask {tuple(loss_mask.shape)}: both must be [T], the "
                "tokens of all responses in one row; flatten [B, n], and repeat a response's value for each token"
            )


def _boundary(
    objective: ObjectiveConfig, x: RuleInput, age: Tensor | None
) -> tuple[BoundaryOutput, Sums, dict[str, Tensor], dict[str, Tensor]]:
    """The rule of the objective on every token; statistics, extremes and marks that only this rule has."""
    rule = objective.boundary
    if not isinstance(rule, SatBoundary):
        return RULES[rule.rule](rule, x), {}, {}, {}
    size = x.log_ratio.abs()
    if rule.quantile_scope == "lag":
        assert age is not None, "a quantile for each lag needs the lag of every token"
        by_lag = boundary.sat_quantiles_by_lag(rule, size, x.layout, age) if x.threshold is None else x.threshold
        q = by_lag[boundary.lag_bucket(torch.where(x.layout.loss_mask, age, 0))]
    else:
        q = boundary.sat_quantile(rule, size, x.layout) if x.threshold is None else x.threshold
    sat = boundary.sat(rule, x, size, q)
    count = x.layout.loss_mask.sum(dtype=torch.float64)
    sums: Sums = {
        "sat/radius_low": (rule.low * (count - (1 - sat.c_low.double()).sum()), count),
        "sat/radius_high": (rule.high * (count - (1 - sat.c_high.double()).sum()), count),
        "sat/gate_rate": (count.new_tensor(float(len(sat.c_low))), count),
        "sat/intervention_rate": (sat.intervened.sum(dtype=torch.float64), count),
        "sat/q": masked_sum(q.double().expand_as(size), x.layout.loss_mask),
    }
    # a leading 1 stands for "nothing contracted", also when there is no token at all
    strongest = torch.cat([sat.c_low.new_ones(1), sat.c_low, sat.c_high]).amin()
    marks = {"gated": sat.gated, "intervened": sat.intervened}
    return sat.band, sums, {"sat/min_contraction": strongest}, marks


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
    count = loss_mask.sum(dtype=torch.float64)
    outside, low = band.outside & loss_mask, x.log_ratio < 0
    positive, negative = x.advantage > 0, x.advantage < 0
    marks = {
        "outside_band": outside,
        "clip_low": band.removed_low & loss_mask,
        "clip_high": band.removed_high & loss_mask,
    }
    sides = {"low": (outside & low, marks["clip_low"]), "high": (outside & ~low, marks["clip_high"])}
    for side, (beyond, removed) in sides.items():
        marks[f"outside_{side}_positive"], marks[f"outside_{side}_negative"] = beyond & positive, beyond & negative
        marks[f"removed_{side}_positive"], marks[f"removed_{side}_negative"] = removed & positive, removed & negative
    sums: Sums = {f"objective/{name}": (mark.sum(dtype=torch.int64).double(), count) for name, mark in marks.items()}
    return {"objective/surrogate": masked_sum(band.surrogate, loss_mask), **sums}


def masked_sum(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over the active tokens, float64 and detached."""
    kept = torch.where(loss_mask, values.detach(), 0)
    return kept.sum(dtype=torch.float64), loss_mask.sum(dtype=torch.float64)
