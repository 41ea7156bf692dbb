"""Corrections: a detached weight on each token's term for the mismatch between trainer and engine.

k = exp(anchor_logp - behavior_logp) of a token, W = the product of k over the active tokens of its response.
Sums and exponentials are taken in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.axes import Correction, DecoupledCorrection, IcepopCorrection, MisCorrection
from steadyrl.objective.rule import Layout

LARGEST_LOG_WEIGHT = 20.0
"""A weight is at most e^20: as an infinity it would meet the zero of a removed gradient, and 0 * inf is NaN."""


def correction_weight(correction: Correction, mismatch: Tensor, layout: Layout) -> Tensor:
    """The weight of each token.

        tis, token      clamp(k, floor, cap)                    fengyao.notion.site/off-policy-rl
        tis, sequence   clamp(W, floor, cap)
        icepop          k where low <= k <= high, else 0         arXiv 2510.18855
        mis             W where low <= W <= high, else 0         the sequence form of verl and slime
        decoupled       min(k, cap), or k                        arXiv 2505.24298

    A log-ratio that is NaN gives weight 0 where there is a band, and NaN elsewhere.

    Args:
        correction: which one.
        mismatch: [T], anchor_logp - behavior_logp, 0 where masked.
        layout: the responses.

    Returns:
        [T], detached, dtype of `mismatch`, 1 where masked.
    """
    log_k = mismatch.detach().double()
    weight = _weight(correction, log_k, layout)
    return torch.where(layout.loss_mask, weight, 1.0).to(mismatch.dtype)


def _weight(correction: Correction, log_k: Tensor, layout: Layout) -> Tensor:
    if isinstance(correction, IcepopCorrection):
        return _inside(_exp(log_k), correction.low, correction.high)
    if isinstance(correction, MisCorrection):
        return _inside(_exp(_product(log_k, layout)), correction.low, correction.high)
    if isinstance(correction, DecoupledCorrection):
        return _exp(log_k).clamp(max=correction.cap) if correction.cap is not None else _exp(log_k)
    log_weight = _product(log_k, layout) if correction.level == "sequence" else log_k
    return _exp(log_weight).clamp(correction.floor, correction.cap)


def _exp(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(max=LARGEST_LOG_WEIGHT).exp()


def _inside(weight: Tensor, low: float, high: float) -> Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def _product(log_k: Tensor, layout: Layout) -> Tensor:
    """log W of each token's response; masked tokens add nothing."""
    active = torch.where(layout.loss_mask, log_k, 0.0)
    return active.new_zeros(layout.num_sequences).index_add(0, layout.sequence, active)[layout.sequence]
