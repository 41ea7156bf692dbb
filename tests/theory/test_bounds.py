"""The paper's Section 3 and Appendix D on random policies, every sequence enumerated, float64.

The oracle walks over sequences in plain Python, with probabilities, not logarithms, and shares nothing
with `diagnostics.trust_region`. Each statement of the theory is checked on the oracle's numbers, and the
module's numbers are checked against the oracle's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.diagnostics.trust_region import (
    envelope,
    sampled_share,
    state_tv,
    state_tv_by_ratio,
    trust_region,
)

TIGHT = 1e-12
Policy = dict[tuple[int, ...], list[float]]  # prefix -> probability of each next token


@dataclass
class World:
    size: int  # V
    horizon: int  # T
    xi: float
    mu: Policy
    pi: Policy
    reward: dict[tuple[int, ...], float]
    sequences: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self):
        self.sequences = list(product(range(self.size), repeat=self.horizon))

    def ratios(self, sequence):
        steps = ((self.mu[sequence[:t]][a], self.pi[sequence[:t]][a]) for t, a in enumerate(sequence))
        return [p / m if m > 0 else 1.0 for m, p in steps]  # what mu never does has no ratio, and no weight

    def probability(self, policy, sequence):
        return math.prod(policy[sequence[:t]][a] for t, a in enumerate(sequence))

    def expect(self, value):
        """E_{y ~ mu}[value(y)]"""
        return sum(self.probability(self.mu, y) * value(y) for y in self.sequences)

    def tv(self, prefix):
        return sum(abs(p - q) for p, q in zip(self.mu[prefix], self.pi[prefix], strict=True)) / 2

    @cached_property
    def improvement(self):
        return sum(
            (self.probability(self.pi, y) - self.probability(self.mu, y)) * self.reward[y] for y in self.sequences
        )

    @cached_property
    def surrogate(self):
        return self.expect(lambda y: self.reward[y] * sum(r - 1 for r in self.ratios(y)))

    @cached_property
    def remainder(self):
        def inner(y):
            r = self.ratios(y)
            return self.reward[y] * sum((r[t] - 1) * (1 - math.prod(r[t + 1 :])) for t in range(self.horizon))

        return self.expect(inner)

    @cached_property
    def max_tv(self):
        return max(self.tv(prefix) for prefix in self.mu if self.probability(self.mu, prefix) > 0)

    @cached_property
    def expected_tv(self):
        return self.expect(lambda y: sum(self.tv(y[:t]) for t in range(self.horizon)))

    @cached_property
    def sequence_tv(self):
        return sum(abs(self.probability(self.mu, y) - self.probability(self.pi, y)) for y in self.sequences) / 2

    def table(self, policy):
        return [
            torch.tensor([policy[prefix] for prefix in product(range(self.size), repeat=t)], dtype=torch.float64).log()
            for t in range(self.horizon)
        ]

    def rewards(self):
        return torch.tensor([self.reward[y] for y in self.sequences], dtype=torch.float64)


def softmax(logits):
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def without(probabilities, action):
    """The distribution with one action taken out of its support."""
    rest = 1 - probabilities[action]
    return [0.0 if a == action else p / rest for a, p in enumerate(probabilities)]


@st.composite
def worlds(draw):
    size, horizon = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    xi = draw(st.sampled_from([0.5, 1.0, 3.0]))
    spread = draw(st.sampled_from([0.3, 2.0]))  # how peaked mu is
    distance = draw(st.sampled_from([0.0, 1e-3, 0.1, 1.0, 5.0]))  # how far pi is from it, in logits
    support = draw(st.sampled_from(["full", "pi loses an action", "both lose an action"]))  # in some states
    extreme = draw(st.booleans())  # rewards at the ends of [-xi, xi], where the bounds are tightest
    random = Random(draw(st.integers(0, 2**32)))
    mu, pi = {}, {}
    for t in range(horizon):
        for prefix in product(range(size), repeat=t):
            logits = [random.gauss(0, spread) for _ in range(size)]
            mu[prefix] = softmax(logits)
            pi[prefix] = softmax([logit + random.gauss(0, distance) for logit in logits])
            if support != "full" and random.random() < 0.5:
                action = random.randrange(size)
                pi[prefix] = without(pi[prefix], action)
                if support == "both lose an action":
                    mu[prefix] = without(mu[prefix], action)
    reward = {
        y: random.choice([-xi, xi]) if extreme else random.uniform(-xi, xi)
        for y in product(range(size), repeat=horizon)
    }
    return World(size, horizon, xi, mu, pi, reward)


checked = settings(max_examples=40, derandomize=True)


@checked
@given(worlds())
def test_the_module_computes_what_the_oracle_says(world):
    found = trust_region(world.table(world.mu), world.table(world.pi), world.rewards(), world.xi)
    horizon, xi = world.horizon, world.xi
    expected = {
        "improvement": world.improvement,
        "surrogate": world.surrogate,
        "remainder": world.remainder,
        "max_tv": world.max_tv,
        "expected_tv": world.expected_tv,
        "sequence_tv": world.sequence_tv,
        "max_bound": world.surrogate - 2 * xi * horizon * (horizon - 1) * world.max_tv**2,
        "average_bound": world.surrogate - 4 * xi * world.expected_tv,
    }
    for name, value in expected.items():
        assert getattr(found, name).item() == pytest.approx(value, rel=1e-9, abs=TIGHT), name


@checked
@given(worlds())
def test_identity_of_the_improvement(world):
    """Eqs. 29-31: J(pi) - J(mu) = L' - Delta, exactly, at any distance; L' of Eq. 3."""
    scale = world.xi * (1 + world.expect(lambda y: sum(abs(r - 1) for r in world.ratios(y))))
    assert world.improvement == pytest.approx(world.surrogate - world.remainder, abs=1e-11 * scale)


@checked
@given(worlds())
def test_telescoping_of_the_product(world):
    """What the identity rests on: prod r - 1 = sum_t (r_t - 1) prod_{j > t} r_j, sequence by sequence."""
    for y in world.sequences:
        r = world.ratios(y)
        total = sum((r[t] - 1) * math.prod(r[t + 1 :]) for t in range(world.horizon))
        assert math.prod(r) - 1 == pytest.approx(total, abs=1e-11 * (1 + math.prod(max(x, 1) for x in r)))


@checked
@given(worlds())
def test_bounds_hold(world):
    """Eqs. 4, 9 and 10, and both together: the smaller penalty may be subtracted."""
    horizon = world.horizon
    by_max = 2 * world.xi * horizon * (horizon - 1) * world.max_tv**2
    by_average = 4 * world.xi * world.expected_tv
    assert abs(world.remainder) <= min(by_max, by_average) + TIGHT
    assert world.improvement >= world.surrogate - min(by_max, by_average) - 1e-10
    found = trust_region(world.table(world.mu), world.table(world.pi), world.rewards(), world.xi)
    assert found.improvement >= found.bound - 1e-10


@checked
@given(worlds())
def test_steps_towards_the_bounds(world):
    """E_mu |r_t - 1| = 2 D_TV[s_t], and E_mu |1 - prod_{j > t} r_j| is at most 2 (T - t) max D_TV, and at most 2."""
    for t in range(world.horizon):
        for prefix in product(range(world.size), repeat=t):
            mu, pi = world.mu[prefix], world.pi[prefix]
            assert sum(m * abs(p / m - 1) for m, p in zip(mu, pi, strict=True) if m > 0) == pytest.approx(
                2 * world.tv(prefix)
            )
        rest = world.horizon - t - 1
        for start in product(range(world.size), repeat=t + 1):
            if world.probability(world.mu, start) == 0:
                continue
            gap = 0.0
            for end in product(range(world.size), repeat=rest):
                r = world.ratios(start + end)[t + 1 :]
                chance = math.prod(world.mu[(start + end)[:j]][(start + end)[j]] for j in range(t + 1, world.horizon))
                gap += chance * abs(1 - math.prod(r))
            assert gap <= min(2 * rest * world.max_tv, 2.0) + TIGHT


@checked
@given(worlds())
def test_distance_of_sequences(world):
    """Eq. 32: D_TV of whole sequences is at most the sum of the states' along mu."""
    assert world.sequence_tv <= world.expected_tv + TIGHT


@checked
@given(worlds())
def test_both_forms_of_the_distance_of_a_state(world):
    """Eq. 5, and Eq. 12: single actions' shares 1/2 mu |r - 1| add up to it."""
    for mu, pi in zip(world.table(world.mu), world.table(world.pi), strict=True):
        tv = state_tv(mu, pi)
        torch.testing.assert_close(state_tv_by_ratio(mu, pi), tv, rtol=1e-9, atol=TIGHT)
        torch.testing.assert_close(sampled_share(mu, pi).sum(-1), tv, rtol=1e-9, atol=TIGHT)
        taken = mu > -math.inf
        by_ratio = mu.exp() * torch.expm1(pi - mu).abs() / 2
        torch.testing.assert_close(by_ratio[taken], sampled_share(mu, pi)[taken], rtol=1e-9, atol=TIGHT)


@checked
@given(worlds(), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_envelope(world, shrink_low, shrink_high):
    """Eqs. 6 and 7: from the ratios of *all* actions of a state to its distance."""
    for prefix, mu in world.mu.items():
        pi, tv = world.pi[prefix], world.tv(prefix)
        ratios = [p / m if m > 0 else 1.0 for m, p in zip(mu, pi, strict=True)]
        logp = torch.tensor(mu, dtype=torch.float64).log()
        # the smallest radii that hold this state's ratios: constants, and one pair per action
        low, high = max(1 - min(ratios), 0.0), max(max(ratios) - 1, 0.0)
        assert tv <= envelope(logp, max(low, high), max(low, high)).item() + TIGHT
        assert envelope(logp, max(low, high), 0.0).item() == pytest.approx(max(low, high) / 2)  # eps / 2
        assert tv <= envelope(logp, low, high).item() + TIGHT
        own_low = torch.tensor([max(1 - r, 0.0) for r in ratios], dtype=torch.float64)
        own_high = torch.tensor([max(r - 1, 0.0) for r in ratios], dtype=torch.float64)
        per_action = envelope(logp, own_low, own_high).item()
        assert per_action == pytest.approx(tv, rel=1e-9, abs=TIGHT)  # tight: these radii leave no room
        wider = envelope(logp, own_low + shrink_low, own_high + shrink_high).item()
        assert tv <= wider + TIGHT


@checked
@given(worlds(), st.floats(0.05, 0.95))
def test_closer_policies_have_smaller_distances(world, share):
    """Mixtures (1 - share) mu + share pi: a state's distance is linear in the share."""
    for prefix, mu in world.mu.items():
        mixed = [(1 - share) * m + share * p for m, p in zip(mu, world.pi[prefix], strict=True)]
        rows = torch.tensor([mu, mixed], dtype=torch.float64).log()
        assert state_tv(rows[0], rows[1]).item() == pytest.approx(share * world.tv(prefix), abs=TIGHT)


def test_the_remainder_is_of_second_order():
    """L' is the first-order part: along a mixture, Delta shrinks with the square of the share."""
    mu = {prefix: [0.5, 0.5] for t in range(3) for prefix in product(range(2), repeat=t)}
    target = {prefix: [0.8, 0.2] if sum(prefix) % 2 else [0.3, 0.7] for prefix in mu}
    reward = {y: float(sum(y) == 1) for y in product(range(2), repeat=3)}
    remainders = []
    for share in (0.1, 0.05, 0.025):
        pi = {s: [(1 - share) * m + share * p for m, p in zip(mu[s], target[s], strict=True)] for s in mu}
        remainders.append(World(2, 3, 1.0, mu, pi, reward).remainder)
    assert abs(remainders[0]) > 1e-4
    assert [a / b for a, b in pairwise(remainders)] == pytest.approx([4, 4], rel=0.1)
