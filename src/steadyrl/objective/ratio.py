"""Log-ratios between the policy being trained and an anchor policy."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from steadyrl.objective.rule import Layout

Unit = Literal["token", "sequence", "sequence_token", "product"]


def at_least_float32(*tensors: Tensor) -> torch.dtype:
    """The dtype in which log-probabilities may be subtracted: float32, or float64 if any of them has it."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def token_log_ratio(logp: Tensor, anchor_logp: Tensor, loss_mask: Tensor) -> Tensor:
    """d = logp - anchor_logp of every token (paper, Eq. 1), differentiable in `logp` only.

    Args:
        logp: [T], floating point.
        anchor_logp: [T], floating point.
        loss_mask: [T] bool.

    Returns:
        [T] float32 (float64 if an input is), exactly 0 where masked.
    """
    dtype = at_least_float32(logp, anchor_logp)
    # both sides are replaced before the subtraction: a masked NaN or inf must not reach the backward pass either
    current = torch.where(loss_mask, logp.to(dtype), 0.0)
    anchor = torch.where(loss_mask, anchor_logp.detach().to(dtype), 0.0)
    return current - anchor


def sequence_log_ratio(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """log rho_b = mean of the log-ratio over the active tokens of sequence b (paper, Eq. 20), on each of them.

    Args:
        log_ratio: [T] from `token_log_ratio`.
        loss_mask: [T] bool.
        sequence: [T] int64, which of the S sequences a token belongs to.
        num_sequences: S.

    Returns:
        [T] in the dtype of `log_ratio`, 0 where masked.
    """
    total = _total_per_sequence(log_ratio, loss_mask, sequence, num_sequences)
    mean = total / tokens_per_sequence(loss_mask, sequence, num_sequences)
    return torch.where(loss_mask, mean[sequence].to(log_ratio.dtype), 0.0)


def product_log_ratio(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """log W_b = sum of the log-ratio over the active tokens of sequence b, on each of them; as `sequence_log_ratio`."""
    total = _total_per_sequence(log_ratio, loss_mask, sequence, num_sequences)
    return torch.where(loss_mask, total[sequence].to(log_ratio.dtype), 0.0)


def tokens_per_sequence(loss_mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Active tokens of each sequence: [S] float64, at least 1 because it is a denominator."""
    ones = loss_mask.to(torch.float64)
    return ones.new_zeros(num_sequences).index_add(0, sequence, ones).clamp(min=1.0)


def unit_log_ratio(unit: Unit, logp: Tensor, anchor_logp: Tensor, layout: Layout) -> Tensor:
    """The log-ratio of the unit that each token belongs to, on each of its tokens.

        token                       d = logp - anchor_logp
        sequence, sequence_token    log rho_b = mean of d over the active tokens of the response (arXiv 2507.18071)
        product                     log W_b = sum of d over them

    Args:
        unit: what one ratio belongs to.
        logp: [T], floating point; differentiable (with `sequence_token` as with `sequence`).
        anchor_logp: [T], floating point.
        layout: which tokens count, and the response each belongs to.

    Returns:
        [T] float32 (float64 if an input is), exactly 0 where masked.
    """
    log_ratio = token_log_ratio(logp, anchor_logp, layout.loss_mask)
    if unit == "token":
        return log_ratio
    per_response = product_log_ratio if unit == "product" else sequence_log_ratio
    return per_response(log_ratio, layout.loss_mask, layout.sequence, layout.num_sequences)


def unit_slope(unit: Unit, layout: Layout) -> Tensor:
    """By how much dS / d(log-ratio) has to be multiplied to become the slope in the token's own log-probability.

    Write S(x) for the surrogate as a function of the log-ratio x of the unit. The loss holds one term w_b S
    for each of the T_b active tokens of response b (the weight w_b is the same for all of them), so

        token             one term holds d_t:            w_b S'(d_t)     * 1          slope 1
        sequence          T_b terms hold their mean:     w_b S'(log rho) * T_b / T_b  slope 1
        product           T_b terms hold their sum:      w_b S'(log W)   * T_b * 1    slope T_b
        sequence_token    one term holds d_t, because its ratio is sg[rho_b] exp(logp_t - sg[logp_t])
                          (GSPO-token, arXiv 2507.18071, Sec. 4.3):  w_b S'(log rho)  slope 1

    With the mean over responses, w_b = 1 / (B T_b), the T_b terms of a response are its one term S / B.

    Returns:
        [T] float64.
    """
    if unit != "product":
        return torch.ones(layout.sequence.shape, dtype=torch.float64, device=layout.sequence.device)
    return tokens_per_sequence(layout.loss_mask, layout.sequence, layout.num_sequences)[layout.sequence]


def prox_approx_logp(logp: Tensor, behavior_logp: Tensor, age: Tensor) -> Tensor:
    """The anchor of A-3PO between the engine and the policy being trained (arXiv 2512.06547, "loglinear").

        behavior + a (sg[logp] - behavior),  a = clamp(1 - 1 / age, 0, 1),  a = 0 for age <= 0

    An age of 1 gives the engine's own number, to the bit.

    Args:
        logp: [T], floating point.
        behavior_logp: [T], floating point.
        age: [T] int64, lag of each token in optimizer steps.

    Returns:
        [T] float32 (float64 if an input is), detached.
    """
    dtype = at_least_float32(logp, behavior_logp)
    behavior = behavior_logp.detach().to(dtype)
    gap = logp.detach().to(dtype) - behavior
    share = 1.0 - 1.0 / age.clamp(min=1).to(dtype)
    # 0 * inf is not 0; and between -inf and a number there is only -inf
    return torch.where((share > 0) & torch.isfinite(gap), behavior + share * gap, behavior)


def saturated_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), held where its square, times lengths and advantages, is still a number of its dtype.

    The limit is e^36 in float32 and e^346 in float64. An infinite coefficient would turn the 0 it is
    multiplied with into a NaN, and no rule distinguishes ratios of this size.
    """
    return saturated_log_ratio(log_ratio).exp()


def saturated_log_ratio(log_ratio: Tensor) -> Tensor:
    """The logarithm of `saturated_ratio`. Nothing holds it from below: exp(-inf) is 0."""
    return log_ratio.detach().clamp(max=math.log(torch.finfo(log_ratio.dtype).max) / 2 - 8.0)


def _total_per_sequence(log_ratio: Tensor, loss_mask: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    active = torch.where(loss_mask, log_ratio, 0.0)
    # |log rho| is some 1e-4 after thousands of terms a hundred times larger: float32 sums would be mostly noise
    return active.new_zeros(num_sequences, dtype=torch.float64).index_add(0, sequence, active.double())
