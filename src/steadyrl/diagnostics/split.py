"""Policy lag and engine mismatch, apart (paper, Eq. 2).

    d = Delta_pi + Delta_impl,    Delta_pi = logp - old_logp,    Delta_impl = old_logp - behavior_logp

`old_logp` is the trainer's own score of the batch *with the weights that sampled it* (the `old_actor` pass).
Delta_pi is then what training has changed, in one implementation; Delta_impl is what two implementations
make of the same weights: numerics, precision, cache, routing. With any other weights the names are wrong,
although the sum still is right. Tokens of different versions each need a score with their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from steadyrl.types import Sums


def split(logp: Tensor, old_logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Delta_pi [T], Delta_impl [T] in float64, 0 where not used, and `used` [T] bool: active, all three finite."""
    used = loss_mask & torch.isfinite(logp) & torch.isfinite(old_logp) & torch.isfinite(behavior_logp)
    current, old, behavior = (
        torch.where(used, value.detach().to(torch.float64), 0.0) for value in (logp, old_logp, behavior_logp)
    )
    return current - old, old - behavior, used


def split_sums(logp: Tensor, old_logp: Tensor, behavior_logp: Tensor, loss_mask: Tensor) -> Sums:
    """Moments of both parts and of their sum, over active tokens, as (sum, count).

    split/policy_d_bar, split/engine_d_bar, split/total_d_bar   mean |part|
    split/policy, split/engine, split/total                     mean
    split/policy_squared, split/engine_squared, split/total_squared
    split/product                                               mean Delta_pi * Delta_impl
    split/not_finite                                            share of active tokens set aside
    """
    policy, engine, used = split(logp, old_logp, behavior_logp, loss_mask)
    sums: Sums = {}
    count, active = used.sum(dtype=torch.float64), loss_mask.sum(dtype=torch.float64)
    for name, part in (("policy", policy), ("engine", engine), ("total", policy + engine)):
        sums[f"split/{name}_d_bar"] = (part.abs().sum(), count)
        sums[f"split/{name}"] = (part.sum(), count)
        sums[f"split/{name}_squared"] = (part.square().sum(), count)
    sums["split/product"] = ((policy * engine).sum(), count)
    sums["split/not_finite"] = (active - count, active)
    return sums


def split_derived(means: Mapping[str, float]) -> dict[str, float]:
    """Variances and the covariance, from pooled means.

    Var(d) = Var(Delta_pi) + Var(Delta_impl) + 2 Cov: a negative covariance hides mismatch from d alone.
    """
    found = {}
    for name in ("policy", "engine", "total"):
        variance = means[f"split/{name}_squared"] - means[f"split/{name}"] ** 2
        found[f"split/{name}_variance"] = 0.0 if variance < 0 else variance  # rounding; NaN stays NaN
    found["split/covariance"] = means["split/product"] - means["split/policy"] * means["split/engine"]
    return found
