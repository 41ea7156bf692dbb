import math

import pytest
import torch

from steadyrl.diagnostics.trust_region import (
    average_bound,
    envelope,
    max_bound,
    remainder,
    sampled_share,
    state_tv,
    state_tv_by_ratio,
    surrogate,
    token_logp,
    topk_divergence,
    trust_region,
    visits,
)

MU = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]], dtype=torch.float64)
PI = torch.tensor([[0.4, 0.3, 0.3], [0.5, 0.5, 0.0]], dtype=torch.float64)
NAN = float("nan")


def table(first, second):
    """T = 2, V = 2, from the probability of token 0 at the start and after each first token."""
    p = torch.tensor([first, *second], dtype=torch.float64)
    rows = torch.stack([p, 1 - p], dim=1).log()
    return [rows[:1], rows[1:]]


def test_both_forms_of_the_distance():
    assert state_tv(MU.log(), PI.log()).tolist() == pytest.approx([0.1, 0.4])
    assert state_tv_by_ratio(MU.log(), PI.log()).tolist() == pytest.approx([0.1, 0.4])


def test_the_ratio_form_misses_what_the_sampler_never_takes():
    mu, pi = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.7, 0.3]).log()
    assert state_tv(mu, pi).item() == pytest.approx(0.3)
    assert state_tv_by_ratio(mu, pi).item() == pytest.approx(0.15)


def test_sampled_shares_add_up_to_the_distance():
    shares = sampled_share(MU.log(), PI.log())
    assert shares[0].tolist() == pytest.approx([0.05, 0, 0.05])
    assert shares.sum(dim=-1).tolist() == pytest.approx([0.1, 0.4])


def test_envelope():
    assert envelope(MU.log(), 0.2, 0.2).tolist() == pytest.approx([0.1, 0.1])
    assert envelope(MU.log(), 0.2, 0.28).tolist() == pytest.approx([0.14, 0.14])
    low, high = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.1, 0.1])
    assert envelope(MU[0].log(), low, high).item() == pytest.approx((0.5 * 0.4 + 0.3 * 0.2 + 0.2 * 0.3) / 2)


def test_tables_list_sequences_in_order():
    mu = table(0.6, [0.9, 0.2])
    expected = [[0.6, 0.9], [0.6, 0.1], [0.4, 0.2], [0.4, 0.8]]
    assert token_logp(mu).exp().tolist() == [pytest.approx(row) for row in expected]
    assert [reached.tolist() for reached in visits(mu)] == [[1.0], pytest.approx([0.6, 0.4])]


def test_everything_by_hand():
    mu, pi = table(0.5, [0.5, 0.5]), table(0.6, [0.5, 0.75])
    reward = torch.tensor([1.0, 0.0, 0.0, -1.0], dtype=torch.float64)
    found = trust_region(mu, pi, reward)
    # J(mu) = 0.25 - 0.25; J(pi) = 0.6 * 0.5 - 0.4 * 0.25
    assert found.improvement.item() == pytest.approx(0.2)
    # token ratios: (1.2, 1) for the first sequence, (0.8, 0.5) for the last
    assert found.surrogate.item() == pytest.approx(0.25 * 0.2 - 0.25 * (-0.2 - 0.5))
    assert found.remainder.item() == pytest.approx(0.25 * 0.2 * 0 - 0.25 * (-0.2) * (1 - 0.5))
    assert found.expected_tv.item() == pytest.approx(0.1 + 0.5 * 0.25)
    assert found.max_tv.item() == pytest.approx(0.25)
    # sequences 0.25 each, against 0.3, 0.3, 0.3, 0.1
    assert found.sequence_tv.item() == pytest.approx(0.15)
    assert found.max_bound.item() == pytest.approx(0.225 - 2 * 2 * 1 * 0.25**2)
    assert found.average_bound.item() == pytest.approx(0.225 - 4 * 0.225)
    assert found.bound.item() == found.max_bound.item()
    assert trust_region(mu, pi, reward, xi=2.0).max_bound.item() == pytest.approx(0.225 - 0.5)


def test_a_state_that_the_sampler_never_reaches_does_not_count():
    mu, pi = table(1.0, [0.5, 0.5]), table(1.0, [0.6, 0.99])
    found = trust_region(mu, pi, torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64))
    assert found.max_tv.item() == pytest.approx(0.1)
    assert found.improvement.item() == pytest.approx(0.1)
    assert (found.surrogate - found.remainder).item() == pytest.approx(0.1)


def test_a_ratio_of_0_is_no_nan():
    probability, reward = torch.tensor([1.0]), torch.tensor([1.0])
    log_ratio = torch.tensor([[math.log(2), -math.inf, 0.0]])
    assert surrogate(probability, reward, log_ratio).item() == pytest.approx(1 - 1 + 0)
    # (2 - 1)(1 - 0) + (0 - 1)(1 - 1) + 0
    assert remainder(probability, reward, log_ratio).item() == pytest.approx(1)


def test_bounds_by_hand():
    first_order, tv = torch.tensor(0.5), torch.tensor(0.01)
    assert max_bound(first_order, tv, horizon=10, xi=1.0).item() == pytest.approx(0.5 - 2 * 10 * 9 * 1e-4)
    assert average_bound(first_order, tv, xi=2.0).item() == pytest.approx(0.5 - 0.08)


def random_pair(size, rows=50):
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(rows, size, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))


def kl(mu, pi):
    return (mu.exp() * (mu - pi)).sum(dim=-1)


@pytest.mark.parametrize("size", [2, 5, 40])
def test_all_tokens_give_the_exact_divergence(size):
    mu, pi = random_pair(size)
    torch.testing.assert_close(topk_divergence(mu, pi, "tv"), state_tv(mu, pi), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(topk_divergence(mu, pi, "kl"), kl(mu, pi), rtol=1e-9, atol=1e-11)
    order = torch.argsort(mu, descending=True)
    shuffled = topk_divergence(mu.gather(-1, order), pi.gather(-1, order), "kl")
    torch.testing.assert_close(shuffled, kl(mu, pi), rtol=1e-9, atol=1e-11)


def test_a_rest_bin_by_hand():
    mu, pi = torch.tensor([0.5, 0.3]), torch.tensor([0.2, 0.3])  # rest 0.2 and 0.5
    assert topk_divergence(mu.log(), pi.log(), "tv").item() == pytest.approx((0.3 + 0 + 0.3) / 2, rel=1e-6)
    expected = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    assert topk_divergence(mu.log(), pi.log(), "kl").item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "exact"), [("tv", state_tv), ("kl", kl)])
def test_more_tokens_never_give_less(kind, exact):
    mu, pi = random_pair(12)
    order = torch.argsort(mu, descending=True)
    mu, pi = mu.gather(-1, order), pi.gather(-1, order)
    values = [topk_divergence(mu[:, :k], pi[:, :k], kind) for k in range(1, 13)]
    for fewer, more in zip(values, [*values[1:], exact(mu, pi)], strict=True):
        assert (fewer <= more + 1e-11).all()
    assert (values[0] < values[-1] - 1e-3).any()


def test_masses_of_nothing_stay_finite():
    mu = torch.tensor([[0.0, -math.inf], [-1e-8, -30.0]])  # one token has it all, or rounding says more than all
    pi = torch.tensor([[-math.inf, 0.0], [0.0, -100.0]])
    for kind in ("tv", "kl"):
        assert torch.isfinite(topk_divergence(mu, pi, kind)).all()
    assert topk_divergence(mu, pi, "tv")[0].item() == pytest.approx(1)
    assert topk_divergence(mu, pi, "kl")[0].item() == pytest.approx(math.log(1e12))


def test_equal_policies_give_exactly_0_and_no_gradient():
    mu = torch.randn(7, 5).log_softmax(-1).requires_grad_()
    for kind in ("tv", "kl"):
        value = topk_divergence(mu[:, :3], mu[:, :3], kind)
        assert value.shape == (7,)
        assert value.dtype == torch.float64
        assert not value.requires_grad
        assert not value.any()
