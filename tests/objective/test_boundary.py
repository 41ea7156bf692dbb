import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.axes import ClipBoundary, SatBoundary
from steadyrl.objective.boundary import (
    LAG_BUCKETS,
    clip,
    interval,
    lag_bucket,
    sat_contraction,
    sat_quantile,
    sat_quantiles_by_lag,
)
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput

DTYPES = [torch.float32, torch.float64]
EPS_LOW, EPS_HIGH = 0.2, 0.28
KERNELS = ["hill", "exp", "exp_continuous", "gauss", "power", "shifted_hill", "const", "zero"]


def rule_input(log_ratio: torch.Tensor, advantage: torch.Tensor) -> RuleInput:
    """One response, every token of it active."""
    tokens = len(log_ratio)
    layout = Layout(torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.int64), 1)
    return RuleInput(log_ratio, advantage, log_ratio - 1.0, torch.full_like(log_ratio, -1.0), layout)


def clip_interval(log_ratio, advantage, low, high) -> BoundaryOutput:
    return interval(rule_input(log_ratio, advantage), low, high)


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
    band = clip_interval(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), 0.2, 0.2)
    assert band.coefficient.item() == pytest.approx(ratio if kept else 0.0)
    assert band.removed.item() is (not kept)
    assert band.outside.item() is (ratio in (1.5, 0.5))
    assert (band.removed_high.item(), band.removed_low.item()) == ((not kept) and ratio > 1, (not kept) and ratio < 1)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5])
def test_without_advantage_nothing_counts_as_removed(ratio):
    band = clip_interval(torch.tensor([math.log(ratio)]), torch.tensor([0.0]), 0.2, 0.2)
    assert not band.removed.item()
    assert band.surrogate.item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_on_the_boundary_is_inside(dtype):
    ratio = torch.tensor([1.5], dtype=dtype).log().exp()
    band = clip_interval(torch.tensor([1.5], dtype=dtype).log(), torch.ones(1, dtype=dtype), 0.5, ratio - 1)
    assert 1 + band.radius_high == ratio  # or the test would not be on the boundary
    assert band.coefficient == ratio


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("radius", [0.2, 3e-4, 0.9])  # float32(1 - 0.9) is not 1 - float32(0.9)
def test_numbers_and_tensors_as_radii_give_the_same_bits(radius, dtype):
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(4000, generator=generator, dtype=dtype) * radius
    advantage = torch.randn(4000, generator=generator, dtype=dtype)
    plain = clip_interval(d, advantage, radius, radius)
    full = clip_interval(d, advantage, torch.full_like(d, radius), torch.full_like(d, radius) * torch.ones_like(d))
    for name in ("surrogate", "coefficient", "radius_low", "radius_high", "outside"):
        assert torch.equal(getattr(plain, name), getattr(full, name)), name


def test_everything_is_detached():
    d = torch.tensor([0.5, -0.5], requires_grad=True)
    rule = ClipBoundary(dual=1.2)
    radius = torch.full((2,), 0.2, requires_grad=True)
    advantage = torch.ones(2, requires_grad=True)
    band = clip_interval(d, advantage, radius, radius)
    tensors = [band.surrogate, band.coefficient, band.radius_low, band.radius_high]
    tensors += sat_contraction(SatBoundary(), d, torch.tensor(0.1, requires_grad=True))
    dual = clip(rule, rule_input(d, advantage))
    tensors += [dual.surrogate, dual.coefficient, sat_quantile(SatBoundary(), d.abs(), rule_input(d, d).layout)]
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.5])
def test_the_kernel_acts_beyond_q_on_the_side_of_the_drift(exponent, dtype):
    d = torch.tensor([0.0, 0.1, -0.1, 0.3, -0.3], dtype=dtype)
    c_low, c_high = sat_contraction(SatBoundary(exponent=exponent), d, d[1])
    kernel = 1 / (1 + 3.0**exponent)
    assert c_low.dtype == c_high.dtype == dtype
    assert c_low.tolist() == pytest.approx([1, 1, 1, 1, kernel], rel=1e-5)  # |d| = q is not gated
    assert c_high.tolist() == pytest.approx([1, 1, 1, kernel, 1], rel=1e-5)


def test_just_beyond_q_the_radius_is_half():
    d = torch.nextafter(torch.tensor([0.1]), torch.tensor([1.0]))
    _, c_high = sat_contraction(SatBoundary(), d, torch.tensor(0.1))
    assert c_high.item() == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_q_zero_turns_the_gate_off(kernel, dtype):
    d = torch.tensor([0.0, 0.5, -3.0, 80.0], dtype=dtype)
    for c in sat_contraction(SatBoundary(kernel=kernel), d, torch.zeros((), dtype=dtype)):
        assert torch.equal(c, torch.ones_like(d))


@pytest.mark.parametrize("q", [1e-45, 1e-38, 1e-20])
def test_a_vanishing_q_gives_no_nan(q):
    c_low, c_high = sat_contraction(SatBoundary(), torch.tensor([1.0, -1.0, 0.0]), torch.tensor(q))
    assert c_high.tolist() == pytest.approx([0, 1, 1])
    assert c_low.tolist() == pytest.approx([1, 0, 1])


def sat_and_ppo(d, sign, q, dtype):
    d = torch.tensor([d], dtype=dtype)
    advantage = torch.tensor([sign], dtype=dtype)
    ppo = clip_interval(d, advantage, EPS_LOW, EPS_HIGH)
    c_low, c_high = sat_contraction(SatBoundary(), d, torch.tensor(q, dtype=dtype))
    return d, clip_interval(d, advantage, ppo.radius_low * c_low, ppo.radius_high * c_high), ppo


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


# ---- dual clip --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dual", [None, 1.1, 3.0])  # 1.1 lies inside the band
@pytest.mark.parametrize("sign", [1.3, -0.7, 0.0])
def test_value_and_gradient_of_the_clip_are_those_of_the_textbook(sign, dual, dtype):
    d = torch.linspace(-2.0, 2.5, 901, dtype=dtype)
    low, high = EPS_LOW, EPS_HIGH
    exact = d.double().requires_grad_()
    ratio = exact.exp()
    textbook = torch.min(ratio * sign, torch.clamp(ratio, 1 - low, 1 + high) * sign)
    if dual is not None and sign < 0:
        textbook = torch.max(textbook, torch.tensor(dual * sign, dtype=torch.float64))
    (slope,) = torch.autograd.grad(textbook.sum(), exact)

    band = clip(ClipBoundary(low=low, high=high, dual=dual), rule_input(d, torch.full_like(d, sign)))
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(band.surrogate.double(), textbook.detach(), **tolerance)
    torch.testing.assert_close((band.coefficient * sign).double(), slope, **tolerance)
    assert torch.equal(band.removed, (slope == 0) & (sign != 0))
    assert (band.outside | ~band.removed).all()


def test_dual_clip_acts_on_negative_advantages_alone():
    d = torch.tensor([1.5, 1.5, 1.5, 1.0])
    advantage = torch.tensor([1.0, -1.0, 0.0, -1.0])
    plain = clip(ClipBoundary(), rule_input(d, advantage))
    dual = clip(ClipBoundary(dual=3.0), rule_input(d, advantage))
    assert dual.surrogate.tolist() == pytest.approx([1.2, -3.0, 0.0, -math.exp(1.0)])
    assert dual.coefficient.tolist() == pytest.approx([0.0, 0.0, math.exp(1.5), math.exp(1.0)])
    assert dual.removed_high.tolist() == [True, True, False, False]
    assert torch.equal(dual.outside, plain.outside)


# ---- kernels ----------------------------------------------------------------------------------------------


FORMULAS = {
    "hill": lambda v, p, kappa: 1 / (1 + v**p),
    "exp": lambda v, p, kappa: math.exp(-kappa * v),
    "exp_continuous": lambda v, p, kappa: math.exp(-kappa * (v - 1)),
    "gauss": lambda v, p, kappa: 0.5 ** (v**2),
    "power": lambda v, p, kappa: (1 / v) ** p,
    "shifted_hill": lambda v, p, kappa: 1 / (1 + (v - 1) ** p),
    "const": lambda v, p, kappa: kappa,
    "zero": lambda v, p, kappa: 0.0,
}
AT_THE_GATE = {"hill": 0.5, "gauss": 0.5, "exp_continuous": 1.0, "power": 1.0, "shifted_hill": 1.0}


def sat_rule(kernel: str) -> SatBoundary:
    return SatBoundary(kernel=kernel, exponent=1.5, strength=0.4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_its_formula_on_the_gated_side(kernel, dtype):
    q = 0.05
    d = torch.tensor([0.0, 0.04, 0.06, 0.1, 0.3, -0.04, -0.06, -0.1, -0.3], dtype=dtype)
    c_low, c_high = sat_contraction(sat_rule(kernel), d, torch.tensor(q))
    expected = [FORMULAS[kernel](abs(x) / q, 1.5, 0.4) if abs(x) > q else 1.0 for x in d.tolist()]
    assert c_high.tolist() == pytest.approx(expected[:5] + [1.0] * 4, rel=1e-5)
    assert c_low.tolist() == pytest.approx([1.0] * 5 + expected[5:], rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_invariants_of_the_kernels(kernel, dtype):
    d = torch.linspace(0.0, 1.0, 2001, dtype=dtype)
    c_low, c_high = sat_contraction(sat_rule(kernel), d, torch.tensor(0.1))
    assert torch.equal(c_low, torch.ones_like(d))
    assert (c_high[d <= 0.1] == 1).all()
    assert (c_high.diff() <= 0).all()
    assert (c_high <= 1).all()
    assert (c_high[d > 0.101] < 1).all()
    assert (c_high > 0).all() or kernel == "zero"
    assert torch.equal(sat_contraction(sat_rule(kernel), -d, torch.tensor(0.1))[0], c_high)


@pytest.mark.parametrize(("kernel", "at_the_gate"), AT_THE_GATE.items())
def test_where_a_kernel_starts(kernel, at_the_gate):
    d = torch.nextafter(torch.tensor([0.1]), torch.tensor([1.0]))
    _, c_high = sat_contraction(sat_rule(kernel), d, torch.tensor(0.1))
    assert c_high.item() == pytest.approx(at_the_gate, abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_endless_drift_gives_no_nan(kernel, dtype):
    d = torch.tensor([700.0, -700.0, math.inf, -math.inf, 0.0], dtype=dtype)
    for q in (0.0, 1e-45, 0.1, 800.0):
        for c in sat_contraction(sat_rule(kernel), d, torch.tensor(q)):
            assert ((c >= 0) & (c <= 1)).all()


# ---- the quantile -----------------------------------------------------------------------------------------


def test_weighing_by_response_counts_every_response_once():
    scores = torch.tensor([0.1] * 12 + [0.2, 0.3] + [9.0])
    sequence = torch.tensor([0] * 12 + [1, 2] + [3])
    layout = Layout(torch.tensor([True] * 14 + [False]), sequence, 4)  # the last response has no active token
    by_token = sat_quantile(SatBoundary(alpha=0.8), scores, layout)
    by_response = sat_quantile(SatBoundary(alpha=0.8, quantile_weight="response"), scores, layout)
    assert by_token.item() == pytest.approx(0.1)
    assert by_response.item() == pytest.approx(0.3)


@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=7), min_size=1, max_size=6),
    st.sampled_from([(0.9, 9, 10), (0.5, 1, 2), (0.25, 1, 4), (0.7, 7, 10)]),
)
def test_the_weighted_quantile_is_the_inverse_of_its_distribution_function(responses, alpha):
    alpha, num, den = alpha
    numbers = sorted({x for response in responses for x in response})

    def share(x: int) -> Fraction:
        shares = [Fraction(sum(y <= x for y in response), len(response)) for response in responses]
        return sum(shares) / len(responses)

    expected = next(x for x in numbers if share(x) >= Fraction(num, den))
    scores = torch.tensor([float(x) for response in responses for x in response])
    lengths = torch.tensor([len(response) for response in responses])
    sequence = torch.repeat_interleave(torch.arange(len(responses)), lengths)
    layout = Layout(torch.ones(len(scores), dtype=torch.bool), sequence, len(responses))
    rule = SatBoundary(alpha=alpha, quantile_weight="response")
    assert sat_quantile(rule, scores, layout).item() == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.booleans()), min_size=1, max_size=30))
def test_a_quantile_for_each_lag_is_that_of_its_tokens_alone(tokens):
    bounds = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]
    scores, ages, active = (torch.tensor(column) for column in zip(*tokens, strict=True))
    layout = Layout(active, torch.zeros(len(tokens), dtype=torch.int64), 1)
    found = sat_quantiles_by_lag(SatBoundary(alpha=0.7), scores.float(), layout, ages)
    assert found.shape == (LAG_BUCKETS,)
    for index, (low, high) in enumerate(bounds):
        group = sorted(score for score, age, is_active in tokens if is_active and low <= age <= high)
        rank = -(-7 * len(group) // 10)
        assert found[index].item() == (group[rank - 1] if group else 0)
    assert not found[len(bounds) :].any()
    assert lag_bucket(torch.tensor([0, 1, 2, 3, 4, 2**14 - 1, 2**14, 10**6])).tolist() == [0, 1, 2, 2, 3, 14, 15, 15]


@pytest.mark.parametrize("weight", ["token", "response"])
@pytest.mark.parametrize("size", [0, 3])
def test_without_an_active_token_q_is_zero(size, weight):
    layout = Layout(torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64), 1)
    q = sat_quantile(SatBoundary(quantile_weight=weight), torch.ones(size), layout)
    assert q.shape == ()
    assert q.item() == 0


# ---- extremes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("drift", [700.0, -700.0, math.inf, -math.inf, 90.0])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_extreme_ratios_give_numbers(drift, advantage, dual, dtype):
    band = clip(
        ClipBoundary(dual=dual), rule_input(torch.tensor([drift], dtype=dtype), torch.tensor([advantage], dtype=dtype))
    )
    assert torch.isfinite(band.surrogate).all()
    assert torch.isfinite(band.coefficient).all()
