"""The PPO clip does not imply the envelope D_TV <= eps / 2 (paper, Eq. 6): it acts on the sampled action alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.diagnostics.trust_region import envelope, sampled_share, state_tv

EPS = 0.2


def ppo_loss(ratio, advantage, eps):
    """The textbook clipped surrogate of one sampled action, to be minimized."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)


@settings(max_examples=100, derandomize=True)
@given(eps=st.floats(0.01, 0.9), share=st.floats(0.05, 0.5))
def test_mass_that_moves_between_actions_not_sampled_is_unseen(eps, share):
    """The sampled action keeps its probability, ratio 1, and the others trade all of theirs."""
    rest = 1 - share
    low = 1e-6
    mu = torch.tensor([share, rest - low, low], dtype=torch.float64).log()
    pi = torch.tensor([share, low, rest - low], dtype=torch.float64).log()
    assert (pi - mu)[0].exp().item() == pytest.approx(1)
    assert sampled_share(mu, pi)[0].item() == 0
    assert state_tv(mu, pi).item() > envelope(mu, eps, eps).item() == pytest.approx(eps / 2)


@pytest.mark.parametrize("learning_rate", [3e-3, 1e-2])
def test_descent_that_the_clip_never_stops_leaves_the_envelope(learning_rate):
    """A frequent action, sampled with A < 0: every update starts strictly inside the clip, D_TV ends near 2 eps / 2.

    With mu = 0.9, the ratio may fall to 0.8, which is 0.18 of probability mass. All of it goes to actions that
    were not sampled, whose ratio is 2.8 then.
    """
    mu = torch.tensor([0.9, 0.06, 0.04], dtype=torch.float64).log()
    logits = mu.clone().requires_grad_()
    updates = 0
    while True:
        logp = logits.log_softmax(-1)
        ratio = (logp - mu)[0].exp()
        if ratio < 1 - EPS + 0.01:  # well before the clip would act
            break
        (gradient,) = torch.autograd.grad(ppo_loss(ratio, -1.0, EPS), logits)
        assert gradient.any()
        with torch.no_grad():
            logits -= learning_rate * gradient
        updates += 1
    assert updates > 5
    final = logits.detach().log_softmax(-1)
    ratios = (final - mu).exp()
    assert 1 - EPS < ratios[0] < 1 + EPS
    assert state_tv(mu, final) > 1.6 * EPS / 2
    assert ratios[1:].max() > 2  # the all-action radius that Eq. 6 asks for is long gone


def test_every_state_of_a_batch_inside_the_clip_and_every_distance_outside():
    """One sample per state, over many states: the share of clipped tokens is 0, and no state is inside the envelope."""
    generator = torch.Generator().manual_seed(0)
    states = 200
    frequent = 0.85 + 0.1 * torch.rand(states, generator=generator, dtype=torch.float64)
    mu = torch.stack([frequent, 0.5 * (1 - frequent), 0.5 * (1 - frequent)], dim=1)
    ratio = 0.82 + 0.05 * torch.rand(states, generator=generator, dtype=torch.float64)  # of the sampled action 0
    taken = frequent * ratio
    pi = torch.stack([taken, 0.9 * (1 - taken), 0.1 * (1 - taken)], dim=1)
    assert ((ratio > 1 - EPS) & (ratio < 1 + EPS)).all()
    assert (state_tv(mu.log(), pi.log()) > EPS / 2).all()


def test_the_clip_limits_the_sampled_share_only():
    """What the clip does bound is |pi - mu| of the sampled action, at eps mu: one term of the sum."""
    mu = torch.tensor([0.9, 0.1], dtype=torch.float64)
    pi = torch.tensor([0.9 * (1 - EPS), 1 - 0.9 * (1 - EPS)], dtype=torch.float64)
    share = sampled_share(mu.log(), pi.log())[0].item()
    assert share == pytest.approx(EPS * 0.9 / 2)
    assert share <= EPS / 2 < state_tv(mu.log(), pi.log()).item()
    assert math.isclose(state_tv(mu.log(), pi.log()).item(), EPS * 0.9)


def test_pull_back_gradients_survive_any_distance():
    """Ratio 50 with A < 0: the clip leaves the gradient as it is, so nothing limits the size of a step."""
    log_ratio = torch.tensor(math.log(50.0), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ppo_loss(log_ratio.exp(), -1.0, EPS), log_ratio)
    assert gradient.item() == pytest.approx(50)
