"""Divergences from full distributions, and the theory of the trust region in numbers (paper, Section 3, Appendix D).

mu is the policy that sampled, pi the policy being trained; both as log-probabilities over the vocabulary.
What follows holds for |R| <= xi, no discount, horizon T, and pi << mu: where mu is 0, pi is 0.

A *table* is a policy written out for sequences of exactly T tokens from V: T tensors, the t-th [V^t, V], one row per
prefix, prefixes counted like numbers in base V with the first token in front. Sequences [V^T] are counted likewise.
All that is computed from tables is exact, and meant for policies small enough to enumerate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SMALLEST_MASS = 1e-12


def state_tv(behavior_logp: Tensor, logp: Tensor) -> Tensor:
    """D_TV(mu || pi)[s] = 1/2 sum_a |mu - pi| (Eq. 5, left): [.., V] -> [..]."""
    return _probability_gap(behavior_logp, logp).sum(dim=-1) / 2


def state_tv_by_ratio(behavior_logp: Tensor, logp: Tensor) -> Tensor:
    """D_TV(mu || pi)[s] = 1/2 E_{a ~ mu} |r(a) - 1| (Eq. 5, right): [.., V] -> [..].

    Equal to `state_tv` under pi << mu. Without it, this form misses the actions that mu never takes.
    """
    possible = torch.isfinite(behavior_logp)
    log_ratio = torch.where(possible, logp - behavior_logp, 0.0)
    return (behavior_logp.exp() * torch.expm1(log_ratio).abs()).sum(dim=-1) / 2


def sampled_share(behavior_logp: Tensor, logp: Tensor) -> Tensor:
    """1/2 mu |r - 1| = 1/2 |pi - mu| of single actions (Eq. 12): their part of D_TV. Shape of the inputs."""
    return _probability_gap(behavior_logp, logp) / 2


def envelope(behavior_logp: Tensor, eps_low: float | Tensor, eps_high: float | Tensor) -> Tensor:
    """1/2 E_{a ~ mu} max(eps_low(a), eps_high(a)) (Eq. 7), eps / 2 for one constant radius (Eq. 6).

    An upper limit of D_TV if the ratio of *every* action is in [1 - eps_low, 1 + eps_high]. The sampled
    action alone does not give it.

    Args:
        behavior_logp: [.., V].
        eps_low, eps_high: constants, or [.., V].
    """
    low = torch.as_tensor(eps_low, dtype=behavior_logp.dtype, device=behavior_logp.device)
    high = torch.as_tensor(eps_high, dtype=behavior_logp.dtype, device=behavior_logp.device)
    return (behavior_logp.exp() * torch.maximum(low, high)).sum(dim=-1) / 2


def topk_divergence(behavior_topk_logp: Tensor, current_logp_at_topk: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Divergence of the state from the sampler's K best tokens and one bin for the rest (DPPO, arXiv 2602.04879).

        tv   1/2 sum |p0 - p|          kl   sum p0 log(p0 / p)          over the K + 1 bins

    Merging tokens never increases a divergence, so this is a lower limit of the state's; with K = V it is
    the state's own. Masses are at least 1e-12, also the rest's, which is 1 minus the others.

    Args:
        behavior_topk_logp: [.., K], of the sampler; -inf fills up where it gave fewer.
        current_logp_at_topk: [.., K], of the policy being trained, for the same tokens.

    Returns:
        [..] float64, without gradient.
    """
    behavior, current = _bins(behavior_topk_logp), _bins(current_logp_at_topk)
    if kind == "tv":
        return (behavior - current).abs().sum(dim=-1) / 2
    return (behavior * (behavior.log() - current.log())).sum(dim=-1)


def surrogate(probability: Tensor, reward: Tensor, log_ratio: Tensor) -> Tensor:
    """L'_mu(pi) = E_mu[ R sum_t (r_t - 1) ] (Eq. 3).

    Args:
        probability: [N], of each sequence under mu; 1 / N each for a sample of mu.
        reward: [N].
        log_ratio: [N, T], per token; 0 after the end of a shorter sequence.
    """
    return (probability * reward * torch.expm1(_possible(log_ratio, probability)).sum(dim=1)).sum()


def remainder(probability: Tensor, reward: Tensor, log_ratio: Tensor) -> Tensor:
    """Delta = E_mu[ R sum_t (r_t - 1)(1 - prod_{j > t} r_j) ] (Eq. 31), so that J(pi) - J(mu) = L' - Delta exactly."""
    log_ratio = _possible(log_ratio, probability)
    from_here = log_ratio.flip(1).cumsum(1).flip(1)  # sum over j >= t
    # shifted, not subtracted: with a ratio of 0 the difference would be -inf + inf
    later = torch.cat([from_here[:, 1:], from_here.new_zeros(len(from_here), 1)], dim=1)
    per_token = torch.expm1(log_ratio) * -torch.expm1(later)
    return (probability * reward * per_token.sum(dim=1)).sum()


def max_bound(surrogate: Tensor, max_tv: Tensor, horizon: int, xi: float | Tensor) -> Tensor:
    """J(pi) - J(mu) >= L' - 2 xi T (T - 1) (max_s D_TV)^2 (Eq. 9)."""
    return surrogate - 2 * xi * horizon * (horizon - 1) * max_tv.square()


def average_bound(surrogate: Tensor, expected_tv: Tensor, xi: float | Tensor) -> Tensor:
    """J(pi) - J(mu) >= L' - 4 xi E_mu sum_t D_TV[s_t] (Eqs. 4 and 10)."""
    return surrogate - 4 * xi * expected_tv


def token_logp(table: Sequence[Tensor]) -> Tensor:
    """[V^T, T]: log-probability of every token of every sequence."""
    horizon, size = len(table), table[0].shape[-1]
    sequence = torch.arange(size**horizon, device=table[0].device)
    columns = [rows.reshape(-1)[sequence // size ** (horizon - 1 - t)] for t, rows in enumerate(table)]
    return torch.stack(columns, dim=1)


def visits(table: Sequence[Tensor]) -> list[Tensor]:
    """[V^t] for each t: how probable the policy makes each prefix."""
    reached = [table[0].new_ones(1)]
    for rows in table[:-1]:
        reached.append((reached[-1].unsqueeze(1) * rows.exp()).reshape(-1))
    return reached


@dataclass(frozen=True)
class TrustRegion:
    """What is true of a pair of policies; 0-d tensors."""

    improvement: Tensor  # J(pi) - J(mu), from the definition of J
    surrogate: Tensor  # L'
    remainder: Tensor  # Delta; improvement = surrogate - remainder
    max_tv: Tensor  # max over the states that mu reaches
    expected_tv: Tensor  # E_mu sum_t D_TV[s_t]
    sequence_tv: Tensor  # of whole sequences, at most expected_tv (Eq. 32)
    max_bound: Tensor  # Eq. 9
    average_bound: Tensor  # Eqs. 4 and 10

    @property
    def bound(self) -> Tensor:
        """The better of the two."""
        return torch.maximum(self.max_bound, self.average_bound)


def trust_region(
    behavior: Sequence[Tensor], current: Sequence[Tensor], reward: Tensor, xi: float | None = None
) -> TrustRegion:
    """The exact numbers of two tables.

    Args:
        behavior: table of mu.
        current: table of pi.
        reward: [V^T].
        xi: limit of |reward|; by default its largest absolute value.
    """
    behavior_logp, logp = token_logp(behavior), token_logp(current)
    probability, current_probability = behavior_logp.sum(dim=1).exp(), logp.sum(dim=1).exp()
    limit = reward.abs().amax() if xi is None else xi
    reached = visits(behavior)
    tv = [state_tv(mu, pi) for mu, pi in zip(behavior, current, strict=True)]
    max_tv = torch.cat([torch.where(d > 0, value, 0.0) for d, value in zip(reached, tv, strict=True)]).amax()
    expected_tv = torch.stack([(d * value).sum() for d, value in zip(reached, tv, strict=True)]).sum()
    first_order = surrogate(probability, reward, logp - behavior_logp)
    return TrustRegion(
        improvement=((current_probability - probability) * reward).sum(),
        surrogate=first_order,
        remainder=remainder(probability, reward, logp - behavior_logp),
        max_tv=max_tv,
        expected_tv=expected_tv,
        sequence_tv=(current_probability - probability).abs().sum() / 2,
        max_bound=max_bound(first_order, max_tv, len(behavior), limit),
        average_bound=average_bound(first_order, expected_tv, limit),
    )


def _probability_gap(behavior_logp: Tensor, logp: Tensor) -> Tensor:
    return (behavior_logp.exp() - logp.exp()).abs()


def _possible(log_ratio: Tensor, probability: Tensor) -> Tensor:
    """Log-ratios of the sequences that mu can give; 0 for the others, whose ratio is not defined."""
    return torch.where(probability.unsqueeze(1) > 0, log_ratio, 0.0)


def _bins(topk_logp: Tensor) -> Tensor:
    """[.., K + 1] float64 masses, the last one the rest."""
    masses = topk_logp.detach().to(torch.float64).exp()
    rest = 1 - masses.sum(dim=-1, keepdim=True)
    return torch.cat([masses, rest], dim=-1).clamp(min=SMALLEST_MASS)
