import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.objective.boundary import clip_boundary, sat_contraction

DTYPES = [torch.float32, torch.float64]
EPS_LOW, EPS_HIGH = 0.2, 0.28


@pytest.mark.parametrize(
    ("ratio", "advantage", "kept"),
    [
        (1.5, 1.0, False),
        (1.5, -1.0, True),  # pulls back
        (1.1, 1.0, True),
        (1.1, -1.0, True),
        (0.9, 1.0, True),
        (0.9, -1.0, True),
        (0.5, 1.0, True),  # pulls back
        (0.5, -1.0, False),
    ],
)
def test_a_gradient_is_removed_only_outside_and_outward(ratio, advantage, kept):
    band = clip_boundary(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.2, 0.2)
    assert band.coefficient.item() == pytest.approx(ratio if kept else 0.0)
    assert band.removed.item() is (not kept)
    assert band.outside.item() is (ratio in (1.5, 0.5))
    assert (band.removed_high.item(), band.removed_low.item()) == ((not kept) and ratio > 1, (not kept) and ratio < 1)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_without_advantage_nothing_counts_as_removed(ratio):
    band = clip_boundary(torch.tensor([math.log(ratio)]), torch.tensor([0.0]), 0.2, 0.2)
    assert not band.removed.item()
    assert band.surrogate.item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_on_the_boundary_is_inside(dtype):
    ratio = torch.tensor([1.5], dtype=dtype).log().exp()
    band = clip_boundary(torch.tensor([1.5], dtype=dtype).log(), torch.ones(1, dtype=dtype), 0.5, ratio - 1)
    assert 1 + band.radius_high == ratio  # or the test would not be on the boundary
    assert band.coefficient == ratio


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("radius", [0.2, 3e-4, 0.9])  # float32(1 - 0.9) is not 1 - float32(0.9)
def test_numbers_and_tensors_as_radii_give_the_same_bits(radius, dtype):
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(4000, generator=generator, dtype=dtype) * radius
    advantage = torch.randn(4000, generator=generator, dtype=dtype)
    plain = clip_boundary(d, advantage, radius, radius)
    full = clip_boundary(d, advantage, torch.full_like(d, radius), torch.full_like(d, radius) * torch.ones_like(d))
    for name in ("surrogate", "coefficient", "radius_low", "radius_high", "outside"):
        assert torch.equal(getattr(plain, name), getattr(full, name)), name


def test_everything_is_detached():
    d = torch.tensor([0.5, -0.5], requires_grad=True)
    radius = torch.full((2,), 0.2, requires_grad=True)
    advantage = torch.ones(2, requires_grad=True)
    band = clip_boundary(d, advantage, radius, radius)
    tensors = [band.surrogate, band.coefficient, band.radius_low, band.radius_high]
    tensors += sat_contraction(d, torch.tensor(0.1, requires_grad=True), 2.0)
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.5])
def test_the_kernel_acts_beyond_q_on_the_side_of_the_drift(exponent, dtype):
    d = torch.tensor([0.0, 0.1, -0.1, 0.3, -0.3], dtype=dtype)
    c_low, c_high = sat_contraction(d, d[1], exponent)
    kernel = 1 / (1 + 3.0**exponent)
    assert c_low.dtype == c_high.dtype == dtype
    assert c_low.tolist() == pytest.approx([1, 1, 1, 1, kernel], rel=1e-5)  # |d| = q is not gated
    assert c_high.tolist() == pytest.approx([1, 1, 1, kernel, 1], rel=1e-5)


def test_just_beyond_q_the_radius_is_half():
    d = torch.nextafter(torch.tensor([0.1]), torch.tensor([1.0]))
    _, c_high = sat_contraction(d, torch.tensor(0.1), 2.0)
    assert c_high.item() == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_q_zero_turns_the_gate_off(dtype):
    d = torch.tensor([0.0, 0.5, -3.0, 80.0], dtype=dtype)
    for c in sat_contraction(d, torch.zeros((), dtype=dtype), 2.0):
        assert torch.equal(c, torch.ones_like(d))


@pytest.mark.parametrize("q", [1e-45, 1e-38, 1e-20])
def test_a_vanishing_q_gives_no_nan(q):
    c_low, c_high = sat_contraction(torch.tensor([1.0, -1.0, 0.0]), torch.tensor(q), 2.0)
    assert c_high.tolist() == pytest.approx([0, 1, 1])
    assert c_low.tolist() == pytest.approx([1, 0, 1])


def sat_and_ppo(d, sign, q, dtype):
    d = torch.tensor([d], dtype=dtype)
    advantage = torch.tensor([sign], dtype=dtype)
    ppo = clip_boundary(d, advantage, EPS_LOW, EPS_HIGH)
    c_low, c_high = sat_contraction(d, torch.tensor(q, dtype=dtype), 2.0)
    return d, clip_boundary(d, advantage, ppo.radius_low * c_low, ppo.radius_high * c_high), ppo


DRIFTS = st.floats(-0.625, 0.625, width=32)
SIGNS = st.sampled_from([1.0, -1.0, 0.0])
QUANTILES = st.one_of(st.just(0.0), st.floats(2.0**-12, 0.5, width=32))


@pytest.mark.parametrize("dtype", DTYPES)
@given(d=DRIFTS, sign=SIGNS, q=QUANTILES)
def test_proposition_4_1_interval(dtype, d, sign, q):
    """(i) The interval lies inside PPO's, strictly on the gated side; the other side is untouched."""
    drift, sat, ppo = sat_and_ppo(d, sign, q, dtype)
    gated = q > 0 and drift.abs().item() > q
    assert (sat.radius_high < ppo.radius_high) if gated and d > 0 else torch.equal(sat.radius_high, ppo.radius_high)
    assert (sat.radius_low < ppo.radius_low) if gated and d < 0 else torch.equal(sat.radius_low, ppo.radius_low)
    assert sat.radius_low >= 0
    assert sat.radius_high >= 0


@pytest.mark.parametrize("dtype", DTYPES)
@given(d=DRIFTS, sign=SIGNS, q=QUANTILES)
def test_proposition_4_1_surrogate(dtype, d, sign, q):
    """(ii) The surrogate is a pointwise lower bound of PPO's."""
    _, sat, ppo = sat_and_ppo(d, sign, q, dtype)
    assert sat.surrogate <= ppo.surrogate


@pytest.mark.parametrize("dtype", DTYPES)
@given(d=DRIFTS, sign=SIGNS, q=QUANTILES)
def test_proposition_4_1_gradient(dtype, d, sign, q):
    """(iii) The gradients differ on the two newly clipped intervals and nowhere else; there SAT's is 0, PPO's A."""
    drift, sat, ppo = sat_and_ppo(d, sign, q, dtype)
    ratio = drift.exp()
    # past PPO's own edge both are 0; the edge itself, where PPO still keeps, belongs to the set
    above = sign > 0 and bool((ratio > 1 + sat.radius_high) & (ratio <= 1 + ppo.radius_high))
    below = sign < 0 and bool((ratio < 1 - sat.radius_low) & (ratio >= 1 - ppo.radius_low))
    if above or below:
        assert sat.coefficient == 0
        assert ppo.coefficient == ratio
    else:
        assert torch.equal(sat.coefficient, ppo.coefficient)
