"""Rejections: tokens whose policy term is left out, mostly whole responses at a time.

What is left out stays in the denominators of the aggregation: the others must not gain weight by it.
A response with a log-ratio that is NaN is rejected wherever the rule has a say about it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.axes import (
    GeometricRejection,
    K3Rejection,
    NegativeVetoRejection,
    OffPolicyRejection,
    Rejection,
    TrustRegionRejection,
)
from steadyrl.objective.ratio import tokens_per_sequence
from steadyrl.objective.rule import Layout


def kept_tokens(rejection: Rejection, policy: Tensor, mismatch: Tensor, advantage: Tensor, layout: Layout) -> Tensor:
    """Which tokens stay.

        geometric       low <= exp(mean d) <= high                           SeqClip, Geo-RS
        k3              mean(e^d - 1 - d) <= limit
        off_policy      A >= 0, or mean(-d) <= delta                         arXiv 2512.02556
        trust_region    max(d^2 / 2) <= max_k2 and mean(e^d - 1 - d) <= mean_k3     arXiv 2512.23075, sampled proxies
        negative_veto   A >= 0, or no earlier token of the response has |e^d - 1| > eps
                        (arXiv 2605.17570 in words; the threshold and its two sides are our variant)

    Means and maxima are over the active tokens of a response; d is `policy` or, where the rule says so, `mismatch`.

    Args:
        rejection: which one.
        policy: [T], logp - anchor_logp, 0 where masked.
        mismatch: [T], anchor_logp - behavior_logp, 0 where masked.
        advantage: [T].
        layout: the responses; the tokens of each are in order.

    Returns:
        [T] bool, true where masked.
    """
    policy, mismatch = policy.detach().double(), mismatch.detach().double()
    # comparisons are written so that NaN fails them
    if isinstance(rejection, GeometricRejection):
        mean = _mean(policy if rejection.of == "policy" else mismatch, layout).exp()
        kept = (mean >= rejection.low) & (mean <= rejection.high)
    elif isinstance(rejection, K3Rejection):
        kept = _mean(_k3(policy if rejection.of == "policy" else mismatch), layout) <= rejection.limit
    elif isinstance(rejection, OffPolicyRejection):
        kept = (advantage >= 0) | (_mean(-policy, layout) <= rejection.delta)
    elif isinstance(rejection, TrustRegionRejection):
        kept = _inside_trust_region(rejection, policy, layout)
    else:
        kept = (advantage >= 0) | _before_the_trigger(rejection, policy, layout)
    return kept | ~layout.loss_mask


def _inside_trust_region(rejection: TrustRegionRejection, policy: Tensor, layout: Layout) -> Tensor:
    kept = torch.ones_like(layout.loss_mask)
    if rejection.max_k2 is not None:
        beyond = ~(policy**2 / 2 <= rejection.max_k2)
        kept = kept & (_sum(beyond.double(), layout) == 0)
    if rejection.mean_k3 is not None:
        kept = kept & (_mean(_k3(policy), layout) <= rejection.mean_k3)
    return kept


def _before_the_trigger(rejection: NegativeVetoRejection, policy: Tensor, layout: Layout) -> Tensor:
    """Tokens up to and with the first one of the response whose ratio leaves [1 - eps, 1 + eps]."""
    trigger = layout.loss_mask & ~(torch.expm1(policy).abs() <= rejection.eps)
    place = torch.arange(policy.numel(), device=policy.device)
    first = place.new_full((layout.num_sequences,), policy.numel())  # beyond the last one: no trigger
    first = first.scatter_reduce(0, layout.sequence, torch.where(trigger, place, policy.numel()), "amin")
    return place <= first[layout.sequence]


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _sum(values: Tensor, layout: Layout) -> Tensor:
    """The sum over the active tokens of each token's response: [T]."""
    active = torch.where(layout.loss_mask, values, 0.0)
    return active.new_zeros(layout.num_sequences).index_add(0, layout.sequence, active)[layout.sequence]


def _mean(values: Tensor, layout: Layout) -> Tensor:
    lengths = tokens_per_sequence(layout.loss_mask, layout.sequence, layout.num_sequences)
    return _sum(values, layout) / lengths[layout.sequence]
