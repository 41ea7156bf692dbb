"""How far the policy that is trained is from the policy that sampled, in log-probability.

    delta = logp - behavior_logp                                    of the sampled token (paper, Eq. 1)

The caller decides which trainer-side log-probability `logp` is, and has to say so next to the numbers:
of the weights being trained, delta holds the drift of the policy and the numerics of the engine; of the
weights that sampled, the engine alone (`split.py` gives both). If `logp` *is* the engine's own tensor,
every statistic is exactly its value at zero. That is no perfect match but no measurement, and
`mismatch/zero` at 1 shows it: two implementations do not agree to the last bit on every token.

Statistics are (sum, count) in float64, so that any cut of the batch, and any ranks, pool to the same
number. They see the batch before any rejection and any truncation of weights. An active token with a
log-probability that is not finite cannot enter a mean: it is set aside and counted by
`mismatch/not_finite`. Masked tokens may hold anything.

Exponents are clamped, here and nowhere in a loss, so that one token cannot make a sum infinite:
e^delta at delta = 20, and the weights of chi^2 and ESS at |log weight| = 10, which is 20 for their squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from steadyrl.diagnostics.layout import Layout
from steadyrl.types import Sums

TAILS = {"0.01": 0.01, "0.05": 0.05, "0.1": 0.1, "0.5": 0.5, "ln2": math.log(2)}  # thresholds on |delta|
QUANTILES = {"q50": "0.5", "q90": "0.9", "q99": "0.99", "q99.9": "0.999"}  # decimal fractions, taken exactly
RATIO_LIMIT = 2  # C of the shares of ratios above C and below 1 / C
MAX_EXPONENT = 20.0
KL_SLACK = 1e-8  # DPPO's, inside both logarithms' arguments


@dataclass(frozen=True)
class Gap:
    """The tokens that can be measured, and 0 in the place of all others. All [T], detached."""

    used: Tensor  # bool, active and finite
    logp: Tensor  # float64
    behavior_logp: Tensor  # float64
    delta: Tensor  # float64


@dataclass(frozen=True)
class Extremes:
    """The worst token by each measure: 0-d tensors, positions into [T], -1 when no token is active."""

    max_abs: Tensor  # largest |delta|; infinite for a token that is not finite, so that its position is told
    max_abs_at: Tensor
    max_probability_gap: Tensor  # largest |p - p0| among finite tokens
    max_probability_gap_at: Tensor


def token_gap(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Gap:
    """delta per token, from floating-point tensors [T]."""
    used = loss_mask & torch.isfinite(logp) & torch.isfinite(behavior_logp)
    # subtracted in float64: the difference of two float32 values near -8 is lost in float32
    current = torch.where(used, logp.detach().to(torch.float64), 0.0)
    behavior = torch.where(used, behavior_logp.detach().to(torch.float64), 0.0)
    return Gap(used, current, behavior, current - behavior)


def mismatch_values(gap: Gap) -> dict[str, Tensor]:
    """Every statistic of `mismatch_sums`, per token: name without prefix -> [T] float64, 0 where not used."""
    delta, size = gap.delta, gap.delta.abs()
    current, behavior = gap.logp.exp(), gap.behavior_logp.exp()
    capped = delta.clamp(max=MAX_EXPONENT)
    log_weight = delta.clamp(-MAX_EXPONENT / 2, MAX_EXPONENT / 2)
    probability_gap = (current - behavior).abs()
    values = {
        "d_bar": size,
        "delta": delta,
        "delta_squared": delta.square(),
        "k1": -delta,
        "k2": delta.square() / 2,
        "k3": torch.expm1(capped) - capped,
        "weight_token": log_weight.exp(),
        "chi2_token": torch.expm1(2 * log_weight),
        "tv_estimate": torch.expm1(capped).abs() / 2,
        "tv_sampled": probability_gap / 2,
        "probability_gap": probability_gap,
        "binary_kl": _binary_kl(gap.behavior_logp, gap.logp),
        "zero": delta == 0,
        f"ratio_above_{RATIO_LIMIT}": delta > math.log(RATIO_LIMIT),
        f"ratio_below_{1 / RATIO_LIMIT:g}": delta < -math.log(RATIO_LIMIT),
        **{f"tail_{name}": size > threshold for name, threshold in TAILS.items()},
    }
    return {name: torch.where(gap.used, value.to(torch.float64), 0.0) for name, value in values.items()}


def mismatch_sums(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Sums:
    """Moments, divergences, weights and tails over active tokens; p = e^logp, p0 = e^behavior_logp.

        mismatch/d_bar            mean |delta|, the drift measure of the paper (Table 1)
        mismatch/delta            mean delta
        mismatch/delta_squared    mean delta^2; `derived` makes the variance of it
        mismatch/k1               mean -delta, estimates KL(behavior || policy), can be negative
        mismatch/k2               mean delta^2 / 2
        mismatch/k3               mean e^delta - 1 - delta, estimates the same KL, never negative
        mismatch/weight_token     mean e^delta, near 1 if the engine reports what it sampled from
        mismatch/chi2_token       mean e^(2 delta) - 1
        mismatch/tv_estimate      mean |e^delta - 1| / 2, estimates D_TV (paper, Eq. 5)
        mismatch/tv_sampled       mean |p - p0| / 2, the sampled tokens' own share of D_TV (paper, Eq. 12)
        mismatch/probability_gap  mean |p - p0|
        mismatch/binary_kl        mean KL between "this token or another": p0 against p (DPPO)
        mismatch/tail_X           share of tokens with |delta| > X
        mismatch/ratio_above_2    share of tokens with e^delta > 2
        mismatch/ratio_below_0.5  share of tokens with e^delta < 1/2
        mismatch/zero             share of tokens with delta exactly 0
        mismatch/not_finite       share of active tokens that were set aside

    Args:
        logp: [T], floating point.
        behavior_logp: [T], floating point.
        loss_mask: [T] bool.
    """
    gap = token_gap(logp, behavior_logp, loss_mask)
    count = gap.used.sum(dtype=torch.float64)
    active = loss_mask.sum(dtype=torch.float64)
    sums: Sums = {f"mismatch/{name}": (value.sum(), count) for name, value in mismatch_values(gap).items()}
    return {**sums, "mismatch/not_finite": (active - count, active)}


def sequence_sums(logp: Tensor, behavior_logp: Tensor, layout: Layout) -> Sums:
    """Statistics of whole responses; each response counts once, and must lie in one micro-batch.

    mismatch/log_ppl_gap          mean over responses of mean(behavior_logp) - mean(logp) = -mean delta
    mismatch/log_ppl_gap_abs      mean of its absolute value
    mismatch/ppl_ratio            mean of exp(that gap): perplexity of the policy / of the engine
    mismatch/weight_sequence      mean of W = exp(sum delta)
    mismatch/chi2_sequence        mean of W^2 - 1
    mismatch/sequence_not_finite  share of responses set aside: with one token unknown, so is W
    """
    total, length, measured, present = _responses(logp, behavior_logp, layout)
    log_ppl_gap = -total / length
    log_weight = total.clamp(-MAX_EXPONENT / 2, MAX_EXPONENT / 2)
    values = {
        "log_ppl_gap": log_ppl_gap,
        "log_ppl_gap_abs": log_ppl_gap.abs(),
        "ppl_ratio": log_ppl_gap.clamp(max=MAX_EXPONENT).exp(),
        "weight_sequence": log_weight.exp(),
        "chi2_sequence": torch.expm1(2 * log_weight),
    }
    count, responses = measured.sum(dtype=torch.float64), present.sum(dtype=torch.float64)
    sums: Sums = {f"mismatch/{name}": (torch.where(measured, v, 0.0).sum(), count) for name, v in values.items()}
    return {**sums, "mismatch/sequence_not_finite": (responses - count, responses)}


def derived(means: Mapping[str, float]) -> dict[str, float]:
    """What is no mean itself, from pooled means; NaN where nothing was counted.

        mismatch/variance      mean delta^2 - (mean delta)^2
        mismatch/ess_token     (sum w)^2 / (N sum w^2) = (mean w)^2 / mean w^2, w = e^delta, in [1/N, 1]
        mismatch/ess_sequence  the same for W of the responses

    A statistic is left out if its means are not there.
    """
    found = {}
    if "mismatch/delta_squared" in means:
        # of equal values, the rounded difference can fall below 0
        found["mismatch/variance"] = _at_least_0(means["mismatch/delta_squared"] - means["mismatch/delta"] ** 2)
    for unit in ("token", "sequence"):
        if f"mismatch/chi2_{unit}" in means:
            share = means[f"mismatch/weight_{unit}"] ** 2 / (1 + means[f"mismatch/chi2_{unit}"])
            found[f"mismatch/ess_{unit}"] = 1 - _at_least_0(1 - share)
    return found


def extremes(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Extremes:
    """The tokens with the largest |delta| and the largest |p - p0|, the first one of equals."""
    gap = token_gap(logp, behavior_logp, loss_mask)
    size = torch.where(loss_mask & ~gap.used, math.inf, gap.delta.abs())
    probability_gap = (gap.logp.exp() - gap.behavior_logp.exp()).abs()
    return Extremes(*_first_largest(size, loss_mask), *_first_largest(probability_gap, gap.used))


def max_abs(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Tensor:
    """The largest |delta| of an active token: 0-d float64, 0 when there is none, see `Extremes`."""
    return extremes(logp, behavior_logp, loss_mask).max_abs


def sequence_extremes(logp: Tensor, behavior_logp: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Smallest and largest log-perplexity gap of a response (see `sequence_sums`): 0-d float64.

    Without a response they are inf and -inf, which pooling by minimum and maximum passes over.
    """
    total, length, measured, _ = _responses(logp, behavior_logp, layout)
    gap, nothing = -total / length, total.new_full((1,), math.inf)
    lowest = torch.cat([nothing, torch.where(measured, gap, math.inf)]).amin()
    highest = torch.cat([-nothing, torch.where(measured, gap, -math.inf)]).amax()
    return lowest, highest


def abs_quantiles(logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """mismatch/q50, q90, q99 and q99.9 of |delta|: 0-d float64, NaN when no token can be measured.

    Each is an order statistic, the k-th smallest of N values with k = ceil(alpha N), as SAT's q is
    (paper, Eq. 14). They are exact over the tokens given *in one call*. Quantiles do not pool: for those of
    a batch, concatenate its micro-batches first; those of one micro-batch say nothing about the batch.
    """
    gap = token_gap(logp, behavior_logp, loss_mask)
    values = gap.delta.abs()[gap.used].sort().values
    found = {}
    for name, alpha in QUANTILES.items():
        rank = math.ceil(Fraction(alpha) * len(values))
        found[f"mismatch/{name}"] = values[rank - 1] if len(values) else values.new_tensor(math.nan)
    return found


def _responses(logp: Tensor, behavior_logp: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[S]: sum of delta, number of tokens, has tokens that are all finite, has active tokens."""
    gap = token_gap(logp, behavior_logp, layout.loss_mask)
    zeros = gap.delta.new_zeros(layout.num_sequences)
    total = zeros.index_add(0, layout.sequence, gap.delta)
    used = zeros.index_add(0, layout.sequence, gap.used.to(torch.float64))
    active = zeros.index_add(0, layout.sequence, layout.loss_mask.to(torch.float64))
    return total, used, (active > 0) & (used == active), active > 0


def _binary_kl(behavior_logp: Tensor, logp: Tensor) -> Tensor:
    """p0 log(p0 / p) + (1 - p0) log((1 - p0 + 1e-8) / (1 - p + 1e-8)) (DPPO, arXiv 2602.04879)."""
    rest, behavior_rest = -torch.expm1(logp), -torch.expm1(behavior_logp)  # 1 - p without cancellation at p near 1
    # a log-probability can be rounded to just above 0
    rest, behavior_rest = rest.clamp(min=0) + KL_SLACK, behavior_rest.clamp(min=0) + KL_SLACK
    odds = torch.log(behavior_rest) - torch.log(rest)
    return behavior_logp.exp() * (behavior_logp - logp) + (behavior_rest - KL_SLACK) * odds


def _first_largest(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value where `mask` is true and its position, 0 and -1 if there is none; values are >= 0."""
    # a -1 in front stands for "none" and keeps the maximum of an empty tensor defined
    padded = torch.cat([values.new_full((1,), -1.0), torch.where(mask, values, -1.0)])
    at = padded.argmax()
    return padded[at].clamp(min=0), at - 1


def _at_least_0(value: float) -> float:
    return 0.0 if value < 0 else value  # NaN stays NaN
