"""avg@k, pass@k and maj@k with two standard errors each: pure functions of counts.

n problems were answered k times each, problem i c_i times rightly:

    avg@k   the mean over problems of c_i / k
    pass@j  the mean over problems of 1 - C(k - c_i, j) / C(k, j), the unbiased estimate of the chance that j samples
            hold a right one (Chen et al., 2021, "Evaluating large language models trained on code"), for j <= k
    maj@k   the mean over problems of: is the most frequent answer right? Right answers are one class however they are
            spelled, a wrong one is the class of its own spelling. A sample without an answer has no vote. Of answers
            that tie, each counts equally: 1/2 for a right one beside one wrong one.

    se          over problems: standard deviation (n - 1 in the denominator) of the problems' values / sqrt(n). What
                another set of such problems would change, resampling of the answers included. None for n = 1.
    se_samples  over samples alone: what another k answers to the same problems would change. The shares seen are taken
                for the true ones: the variance of pass@j is exact for c_i from a binomial, that of maj@k comes from
                DRAWS multinomial draws of all answers. Both are multiplied by k / (k - 1), which makes the error of
                avg@k = pass@1 the unbiased one. None for k = 1. An answer that was never seen has no share, so with
                few samples the others are too small rather than too large.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

DRAWS = 2000


@dataclass(frozen=True)
class Score:
    """A mean over problems and its standard errors; None where one is unknown."""

    value: float
    se: float | None
    se_samples: float | None


@dataclass(frozen=True)
class Votes:
    """The answers to one problem: how many are right, and how often each wrong one came; the rest has no answer."""

    right: int
    wrong: tuple[int, ...]
    k: int

    @classmethod
    def count(cls, samples: Sequence[tuple[bool, str | None]]) -> Votes:
        """From (is it right, its answer) of each sample."""
        wrong = Counter(answer for is_right, answer in samples if not is_right and answer is not None)
        return cls(sum(is_right for is_right, _ in samples), tuple(sorted(wrong.values())), len(samples))


def avg_at_k(votes: Sequence[Votes]) -> Score:
    return pass_at(1, votes)


def pass_at(j: int, votes: Sequence[Votes]) -> Score:
    k = votes[0].k
    mean, se = mean_and_se([pass_at_k(k, vote.right, j) for vote in votes])
    return Score(mean, se, _over_samples(k, [_pass_variance(k, vote.right, j) for vote in votes]))


def maj_at_k(votes: Sequence[Votes], seed: int = 0) -> Score:
    """`seed` is of the draws behind `se_samples`; the same seed gives the same number."""
    mean, se = mean_and_se([majority(vote.right, vote.wrong) for vote in votes])
    rng = np.random.default_rng(seed)
    return Score(mean, se, _over_samples(votes[0].k, [_majority_variance(vote, rng) for vote in votes]))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the c right ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n >= k samples.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n = {n}, c = {c}, k = {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(right: int, wrong: Sequence[int]) -> float:
    """1 if right answers are the most frequent ones, 0 if others are, 1 / m if they share that place with m - 1."""
    most = max(right, *wrong, 0)
    if right < most or most == 0:
        return 0.0
    return 1.0 / (1 + sum(count == most for count in wrong))


def mean_and_se(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; None as the error of a single value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n)


def _over_samples(k: int, variances: Sequence[float]) -> float | None:
    """The standard deviation of a mean over independent problems, from each one's plug-in variance."""
    if k == 1:
        return None
    return math.sqrt(math.fsum(variances) * k / (k - 1)) / len(variances)


@cache
def _pass_variance(k: int, c: int, j: int) -> float:
    share = c / k
    chances = [math.comb(k, x) * share**x * (1 - share) ** (k - x) for x in range(k + 1)]
    values = [pass_at_k(k, x, j) for x in range(k + 1)]
    mean = math.fsum(p * value for p, value in zip(chances, values, strict=True))
    return math.fsum(p * (value - mean) ** 2 for p, value in zip(chances, values, strict=True))


def _majority_variance(vote: Votes, rng: np.random.Generator) -> float:
    silent = vote.k - vote.right - sum(vote.wrong)
    shares = np.array([vote.right, *vote.wrong, silent]) / vote.k
    if shares.max() == 1:
        return 0.0
    draws = rng.multinomial(vote.k, shares, size=DRAWS)[:, :-1]  # [DRAWS, answers], those without one left out
    most = draws.max(axis=1)
    is_right = (draws[:, 0] == most) & (most > 0)
    tied = (draws == most[:, None]).sum(axis=1)
    return float(np.var(is_right / tied))
