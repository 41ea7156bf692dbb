import math

import pytest
import torch

from steadyrl.objective.ratio import (
    prox_approx_logp,
    saturated_log_ratio,
    saturated_ratio,
    sequence_log_ratio,
    token_log_ratio,
    unit_log_ratio,
    unit_slope,
)
from steadyrl.objective.rule import Layout

GARBAGE = [float("nan"), float("inf"), float("-inf"), -1e4]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_tokens_are_zero_in_value_and_gradient(garbage):
    mask = torch.tensor([True, False, True])
    logp = torch.tensor([-1.0, garbage, -2.0], requires_grad=True)
    anchor = torch.tensor([-1.5, garbage, -1.0])
    ratio = token_log_ratio(logp, anchor, mask)
    assert ratio.tolist() == [0.5, 0.0, -1.0]
    ratio.exp().sum().backward()
    assert logp.grad.tolist() == pytest.approx([math.exp(0.5), 0.0, math.exp(-1.0)])


@pytest.mark.parametrize(
    ("current", "anchor", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_the_difference_is_taken_in_float32_or_better(current, anchor, expected):
    ratio = token_log_ratio(
        torch.tensor([-8.0], dtype=current), torch.tensor([-8.03], dtype=anchor), torch.tensor([True])
    )
    assert ratio.dtype == expected
    if anchor == torch.float32:
        assert ratio.item() == pytest.approx(0.03, rel=1e-4)  # bfloat16 would round 8.03 to 8


def test_no_gradient_reaches_the_anchor():
    anchor = torch.tensor([-1.0], requires_grad=True)
    logp = torch.tensor([-2.0], requires_grad=True)
    token_log_ratio(logp, anchor, torch.tensor([True])).sum().backward()
    assert anchor.grad is None


def test_a_sequence_has_the_mean_of_its_active_tokens():
    log_ratio = torch.tensor([0.1, 0.3, 7.0, -0.4, 9.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, False])
    sequence = torch.tensor([1, 1, 1, 0, 2])  # in no order; sequence 2 has no active token
    ratio = sequence_log_ratio(log_ratio, mask, sequence, 3)
    torch.testing.assert_close(ratio, torch.tensor([0.2, 0.2, 0.0, -0.4, 0.0], dtype=torch.float64))


def test_a_long_sequence_keeps_its_small_mean():
    noise = torch.tensor([0.01, -0.01], dtype=torch.float32).repeat(16384)
    log_ratio = noise + 2e-6
    ratio = sequence_log_ratio(log_ratio, torch.ones(32768, dtype=torch.bool), torch.zeros(32768, dtype=torch.int64), 1)
    assert ratio[0].item() == pytest.approx(log_ratio.double().mean().item(), rel=1e-6)


# ---- units ------------------------------------------------------------------------------------------------

LAYOUT = Layout(
    loss_mask=torch.tensor([True, True, False, True, False]), sequence=torch.tensor([1, 1, 1, 0, 2]), num_sequences=3
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("token", [0.1, 0.3, 0, -0.4, 0]),
        ("sequence", [0.2, 0.2, 0, -0.4, 0]),
        ("sequence_token", [0.2, 0.2, 0, -0.4, 0]),
        ("product", [0.4, 0.4, 0, -0.4, 0]),
    ],
)
def test_the_log_ratio_of_every_unit(unit, expected, dtype):
    anchor = torch.tensor([-1.0, -2.0, float("nan"), -3.0, -math.inf], dtype=dtype)
    logp = anchor + torch.tensor([0.1, 0.3, 7.0, -0.4, 9.0], dtype=dtype)
    ratio = unit_log_ratio(unit, logp, anchor, LAYOUT)
    assert ratio.dtype == dtype
    assert ratio.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("token", [1] * 5), ("sequence", [1] * 5), ("sequence_token", [1] * 5), ("product", [2, 2, 2, 1, 1])],
)
def test_the_slope_of_every_unit(unit, expected):
    slope = unit_slope(unit, LAYOUT)
    assert slope.dtype == torch.float64
    assert slope.tolist() == expected


@pytest.mark.parametrize("token_weight", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("unit", ["token", "sequence", "product"])
def test_the_slope_is_that_of_the_formula_of_a_whole_response(unit, token_weight):
    """Surrogate exp(log-ratio): the mean over responses of S_b, and the sum of T_b S_b over all tokens."""
    logp = torch.tensor([-0.3, -0.9, -0.5, -0.2, -0.7, -0.1], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-0.5, -0.7, -0.6, -0.1, -0.8, -0.4], dtype=torch.float64)
    parts = [slice(0, 1), slice(1, 3), slice(3, 6)]
    expected = 0.0
    for part in parts:
        d = logp[part] - anchor[part]
        terms = {"token": d.exp(), "sequence": d.mean().exp().reshape(1), "product": d.sum().exp().reshape(1)}[unit]
        expected = expected + (terms.mean() / 3 if token_weight == "sequence_mean" else terms.mean() * len(d) / 6)
    (expected_slope,) = torch.autograd.grad(expected, logp)

    layout = Layout(torch.ones(6, dtype=torch.bool), torch.tensor([0, 1, 1, 2, 2, 2]), 3)
    lengths = torch.tensor([1, 2, 2, 3, 3, 3])
    weight = 1 / (3 * lengths) if token_weight == "sequence_mean" else torch.full((6,), 1 / 6)
    ratio = unit_log_ratio(unit, logp.detach(), anchor, layout).exp()
    torch.testing.assert_close(weight * ratio * unit_slope(unit, layout), expected_slope, rtol=1e-6, atol=0)


# ---- the interpolated anchor ------------------------------------------------------------------------------


def test_the_interpolated_anchor_moves_towards_the_policy_with_age():
    logp = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    behavior = torch.full((6,), -2.0, dtype=torch.float64)
    anchor = prox_approx_logp(logp, behavior, torch.tensor([-1, 0, 1, 2, 4, 10]))
    assert anchor.tolist() == pytest.approx([-2, -2, -2, -1.5, -1.25, -1.1])
    assert not anchor.requires_grad


def test_the_ratios_of_the_interpolated_anchor_are_powers_of_the_whole_ratio():
    logp, behavior = torch.tensor([-0.7], dtype=torch.float64), torch.tensor([-1.9], dtype=torch.float64)
    for age in (1, 2, 3, 8):
        anchor = prox_approx_logp(logp, behavior, torch.tensor([age]))
        assert (logp - anchor).item() == pytest.approx(1.2 / age)
        assert (anchor - behavior).item() == pytest.approx(1.2 * (1 - 1 / age))


@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("logp", [-math.inf, -1.0, float("nan")])
def test_up_to_age_one_it_is_the_engines_number_to_the_bit(logp, age):
    behavior = torch.tensor([-0.1, -2.3, -math.inf])
    assert torch.equal(prox_approx_logp(torch.full((3,), logp), behavior, torch.full((3,), age)), behavior)


def test_the_interpolated_anchor_of_an_excluded_token_is_no_nan():
    logp, behavior = torch.tensor([-1.0, -math.inf]), torch.tensor([-math.inf, -1.0])
    assert not prox_approx_logp(logp, behavior, torch.tensor([3, 3])).isnan().any()


# ---- saturation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 36.0), (torch.float64, 346.0)])
def test_a_ratio_is_exact_until_its_square_would_overflow(dtype, limit):
    drift = torch.tensor([-math.inf, -700.0, -1.0, 0.0, 1.0, limit, 700.0, math.inf], dtype=dtype)
    ratio = saturated_ratio(drift)
    assert torch.equal(ratio[:6], drift[:6].exp())
    assert torch.isfinite(1e4 * ratio**2).all()
    assert torch.equal(saturated_log_ratio(drift)[:6], drift[:6])
