"""The policy loss: the one place where ratio, boundary, aggregation and penalty meet.

    loss = sum over active tokens of weight * ( -S + kl_coef * k3 )

S carries two things at once: the *value* is the surrogate of the paper, the *gradient* is
coefficient * advantage * grad logp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadyrl.config import ObjectiveConfig, SatBoundary
from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.objective.boundary import BoundaryOutput, clip_boundary, sat_contraction
from steadyrl.objective.penalty import kl_k3
from steadyrl.objective.quantile import order_statistic
from steadyrl.objective.ratio import sequence_log_ratio, token_log_ratio
from steadyrl.types import BatchCounts, Sums


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch, and what there is to say about it."""

    loss: Tensor  # 0-d; the losses of the micro-batches of a batch add up
    sums: Sums  # (sum, count), both 0-d float64 and detached
    extremes: dict[str, Tensor] = field(default_factory=dict)  # 0-d, detached; pooled by their minimum


def trust_region_score(
    objective: ObjectiveConfig,
    logp: Tensor,
    anchor_logp: Tensor,
    loss_mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
) -> Tensor:
    """|log-ratio| in the objective's unit: what the quantile of SAT is taken over. [T], detached, 0 where masked."""
    return _log_ratio(objective, logp.detach(), anchor_logp, loss_mask, sequence, num_sequences).abs()


def policy_loss(
    objective: ObjectiveConfig,
    *,
    logp: Tensor,
    anchor_logp: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    counts: BatchCounts,
    quantile: Tensor | None = None,
    reference_logp: Tensor | None = None,
) -> LossOutput:
    """The loss of one micro-batch of whole sequences.

    Masked tokens may hold anything, NaN and inf included. Without an active token the loss is a 0
    that can still be differentiated.

    Args:
        objective: the point of the design space.
        logp: [T], the policy being trained; the only input that is differentiated.
        anchor_logp: [T], the policy that ratios are taken against.
        advantage: [T], the same for all tokens of a sequence when `unit` is "sequence".
        loss_mask: [T] bool, true on the tokens that are trained on.
        sequence: [T] int64, which of the S sequences a token belongs to.
        num_sequences: S.
        counts: active tokens and sequences of the whole optimizer batch.
        quantile: 0-d, q of SAT; None takes it over this micro-batch.
        reference_logp: [T]; when given, k3 towards it is added with weight `kl_coef`.
    """
    log_ratio = _log_ratio(objective, logp.detach(), anchor_logp, loss_mask, sequence, num_sequences)
    advantage = torch.where(loss_mask, advantage.detach().to(log_ratio.dtype), 0.0)
    weight = aggregation_weight(objective.aggregation, loss_mask, sequence, num_sequences, counts).to(log_ratio.dtype)

    band, sat_sums, extremes = _boundary(objective, log_ratio, advantage, loss_mask, quantile)
    # zero in value, one in slope; the mask comes first, because NaN - NaN is not 0
    slope = token_log_ratio(logp, logp, loss_mask)
    loss = -(weight * (band.surrogate + band.coefficient * advantage * slope)).sum()
    sums = _clip_sums(band, loss_mask) | sat_sums

    if reference_logp is not None:
        penalty = kl_k3(logp, reference_logp, loss_mask)
        loss = loss + objective.kl_coef * (weight * penalty).sum()
        sums["penalty/kl_ref"] = _masked_sum(penalty, loss_mask)
    return LossOutput(loss=loss, sums=sums, extremes=extremes)


def _log_ratio(
    objective: ObjectiveConfig,
    logp: Tensor,
    anchor_logp: Tensor,
    loss_mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
) -> Tensor:
    """The log-ratio in the objective's unit: [T], 0 where masked."""
    log_ratio = token_log_ratio(logp, anchor_logp, loss_mask)
    if objective.unit == "sequence":
        return sequence_log_ratio(log_ratio, loss_mask, sequence, num_sequences)
    return log_ratio


def _boundary(
    objective: ObjectiveConfig,
    log_ratio: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    quantile: Tensor | None,
) -> tuple[BoundaryOutput, Sums, dict[str, Tensor]]:
    """The rule of the objective on every token, and the statistics that only this rule has."""
    rule = objective.boundary
    base = clip_boundary(log_ratio, advantage, rule.low, rule.high)
    if not isinstance(rule, SatBoundary):
        return base, {}, {}

    q = order_statistic(log_ratio.abs(), loss_mask, rule.alpha) if quantile is None else quantile.detach()
    c_low, c_high = sat_contraction(log_ratio, q, rule.exponent)
    band = clip_boundary(log_ratio, advantage, base.radius_low * c_low, base.radius_high * c_high)
    contraction = torch.minimum(c_low, c_high)
    count = loss_mask.sum(dtype=torch.float64)
    sums: Sums = {
        "sat/radius_low": _masked_sum(band.radius_low, loss_mask),
        "sat/radius_high": _masked_sum(band.radius_high, loss_mask),
        "sat/gate_rate": _masked_sum(contraction < 1, loss_mask),
        "sat/intervention_rate": _masked_sum(band.removed & ~base.removed, loss_mask),
        "sat/q": (q.double() * count, count),
    }
    # a leading 1 stands for "nothing contracted", also when there is no token at all
    strongest = torch.cat([contraction.new_ones(1), contraction[loss_mask]]).amin()
    return band, sums, {"sat/min_contraction": strongest}


def _clip_sums(band: BoundaryOutput, loss_mask: Tensor) -> Sums:
    """The statistics that every rule has."""
    return {
        "objective/surrogate": _masked_sum(band.surrogate, loss_mask),
        "objective/outside_band": _masked_sum(band.outside, loss_mask),
        "objective/clip_low": _masked_sum(band.removed_low, loss_mask),
        "objective/clip_high": _masked_sum(band.removed_high, loss_mask),
    }


def _masked_sum(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over the active tokens, float64 and detached."""
    kept = torch.where(loss_mask, values.detach().to(torch.float64), 0.0)
    return kept.sum(), loss_mask.sum(dtype=torch.float64)
