"""Soft rules: value and gradient against the published formulas, under autograd in float64."""

import math

import pytest
import torch
from torch import Tensor

from steadyrl.axes import (
    CispoBoundary,
    DrpoBoundary,
    ImportanceBoundary,
    SapoBoundary,
    SpoBoundary,
    ToprBoundary,
    UnboundedPositiveBoundary,
    VespoBoundary,
)
from steadyrl.objective import soft_rules
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput

DTYPES = [torch.float32, torch.float64]
TOKENS = 500

RULES = {
    "reinforce": ImportanceBoundary(weighted=False),
    "exact": ImportanceBoundary(),
    "truncated": ImportanceBoundary(cap=1.3),
    "cispo": CispoBoundary(),
    "cispo two-sided": CispoBoundary(low=0.2, high=0.3),
    "spo": SpoBoundary(eps=0.3),
    "drpo": DrpoBoundary(delta=0.1),
    "sapo": SapoBoundary(tau_positive=1.0, tau_negative=2.0),
    "vespo": VespoBoundary(),
    "unbounded_positive": UnboundedPositiveBoundary(low=0.2, high=0.3),
    "topr": ToprBoundary(),
}
POLICY_GRADIENTS = ["reinforce", "exact", "truncated", "cispo", "cispo two-sided", "vespo", "topr"]


def run(name: str, x: RuleInput) -> BoundaryOutput:
    return getattr(soft_rules, RULES[name].rule)(RULES[name], x)


def rule_input(logp: Tensor, anchor: Tensor, advantage: Tensor, mask: Tensor | None = None) -> RuleInput:
    active = torch.ones(len(logp), dtype=torch.bool) if mask is None else mask
    layout = Layout(active, torch.zeros(len(logp), dtype=torch.int64), 1)
    return RuleInput(logp - anchor, advantage, logp, anchor, layout)


def random_input(sign: float, dtype: torch.dtype) -> RuleInput:
    generator = torch.Generator().manual_seed(0)
    anchor = -3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64) ** 2
    drift = 0.3 * torch.randn(TOKENS, generator=generator, dtype=torch.float64) ** 3
    logp = torch.minimum(anchor + drift, torch.tensor(-1e-4))
    advantage = sign * torch.randn(TOKENS, generator=generator, dtype=torch.float64).abs()
    return rule_input(logp.to(dtype), anchor.to(dtype), advantage.to(dtype))


# ---- the published formulas -------------------------------------------------------------------------------


def textbook(name: str, logp: Tensor, anchor: Tensor, advantage: Tensor) -> Tensor:
    """S of every token, differentiable in `logp`."""
    rule = RULES[name]
    ratio = torch.exp(logp - anchor)
    r = ratio.detach()
    reinforce = advantage * logp
    if name == "reinforce":
        return reinforce
    if name == "exact":
        return r * reinforce
    if name == "truncated":
        return torch.clamp(r, max=rule.cap) * reinforce
    if name == "cispo":
        return torch.clamp(r, max=5.0) * reinforce  # no lower bound
    if name == "cispo two-sided":
        return torch.clamp(r, 1 - rule.low, 1 + rule.high) * reinforce
    if name == "spo":
        return ratio * advantage - advantage.abs() / (2 * rule.eps) * (ratio - 1) ** 2
    if name == "drpo":
        mu = torch.exp(anchor)
        return ratio * advantage - advantage.abs() / (2 * rule.delta) * mu * (ratio - 1) ** 2
    if name == "sapo":
        tau = torch.where(advantage > 0, rule.tau_positive, rule.tau_negative).double()
        return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
    if name == "vespo":
        positive = advantage >= 0
        k, lam = torch.where(positive, 2.0, 3.0).double(), torch.where(positive, 3.0, 2.0).double()
        return r**k * torch.exp(lam * (1 - r)) * reinforce
    if name == "unbounded_positive":
        clipped = torch.clamp(ratio, 1 - rule.low, 1 + rule.high)
        on_itself = torch.exp(logp - logp.detach())
        return torch.where(advantage > 0, on_itself * advantage, torch.min(ratio * advantage, clipped * advantage))
    assert name == "topr"
    return torch.where(advantage > 0, 1.0, torch.clamp(r, 0.0, 1.0)) * reinforce


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("name", RULES)
def test_value_and_gradient_are_those_of_the_textbook(name, sign, dtype):
    x = random_input(sign, dtype)
    logp = x.logp.double().requires_grad_()
    expected = textbook(name, logp, x.anchor_logp.double(), x.advantage.double())
    (slope,) = torch.autograd.grad(expected.sum(), logp)
    band = run(name, x)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 5e-5, "atol": 5e-6}
    assert band.surrogate.dtype == band.coefficient.dtype == dtype
    torch.testing.assert_close(band.surrogate.double(), expected.detach(), **tolerance)
    torch.testing.assert_close((band.coefficient * x.advantage).double(), slope, **tolerance)
    assert band.is_weight is (name in POLICY_GRADIENTS)


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_removed_but_by_the_clip_of_unbounded_positive(name):
    positive, negative = run(name, random_input(1.0, torch.float64)), run(name, random_input(-1.0, torch.float64))
    assert not positive.removed.any()
    assert negative.removed.any().item() is (name == "unbounded_positive")
    assert (negative.outside | ~negative.removed).all()


@pytest.mark.parametrize(
    ("name", "advantage", "limits"),
    [
        ("reinforce", 1.0, (0, math.inf)),
        ("exact", 1.0, (0, math.inf)),
        ("truncated", 1.0, (0, 1.3)),
        ("cispo", 1.0, (0, 5.0)),
        ("cispo two-sided", -1.0, (0.8, 1.3)),
        ("spo", 1.0, (0.7, 1.3)),
        ("drpo", -1.0, (0.8, 1.2)),  # anchor 0.5, delta 0.1
        ("sapo", 1.0, (0, math.inf)),
        ("vespo", 1.0, (0, math.inf)),
        ("unbounded_positive", 1.0, (0, math.inf)),
        ("unbounded_positive", -1.0, (0.8, 1.3)),
        ("topr", 1.0, (0, math.inf)),
        ("topr", -1.0, (0, 1.0)),
    ],
)
def test_outside_is_beyond_the_limit_of_the_rule(name, advantage, limits):
    ratio = torch.tensor([0.05, 0.69, 0.79, 0.81, 0.99, 1.01, 1.19, 1.21, 1.31, 4.9, 5.1], dtype=torch.float64)
    anchor = torch.full_like(ratio, math.log(0.5))
    x = rule_input(anchor + ratio.log(), anchor, torch.full_like(ratio, advantage))
    assert torch.equal(run(name, x).outside, (ratio < limits[0]) | (ratio > limits[1]))


# ---- coefficients in closed form --------------------------------------------------------------------------


def logistic(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def sapo_coefficient(r: float, a: float, p0: float) -> float:
    s = logistic((1.0 if a > 0 else 2.0) * (r - 1))
    return 4 * s * (1 - s) * r


def vespo_coefficient(r: float, a: float, p0: float) -> float:
    k, lam = (2, 3) if a >= 0 else (3, 2)
    return math.exp(lam + k * math.log(r) - lam * r)


def unbounded_positive_coefficient(r: float, a: float, p0: float) -> float:
    return 1 if a > 0 else r * (r >= 0.8)


COEFFICIENTS = {
    "reinforce": lambda r, a, p0: 1,
    "exact": lambda r, a, p0: r,
    "truncated": lambda r, a, p0: min(r, 1.3),
    "cispo": lambda r, a, p0: min(r, 5.0),
    "cispo two-sided": lambda r, a, p0: min(max(r, 0.8), 1.3),
    "spo": lambda r, a, p0: r * (1 - math.copysign(1, a) * (r - 1) / 0.3),
    "drpo": lambda r, a, p0: r * (1 - math.copysign(1, a) * (r * p0 - p0) / 0.1),
    "sapo": sapo_coefficient,
    "vespo": vespo_coefficient,
    "unbounded_positive": unbounded_positive_coefficient,
    "topr": lambda r, a, p0: 1 if a > 0 else min(r, 1),
}


@pytest.mark.parametrize("p0", [0.01, 0.3])
@pytest.mark.parametrize("advantage", [0.8, -0.8])
@pytest.mark.parametrize("ratio", [0.1, 0.75, 1.0, 1.25, 3.0])
@pytest.mark.parametrize("name", RULES)
def test_the_table_of_gradient_coefficients(name, ratio, advantage, p0):
    anchor = torch.tensor([math.log(p0)], dtype=torch.float64)
    x = rule_input(anchor + math.log(ratio), anchor, torch.tensor([advantage], dtype=torch.float64))
    assert run(name, x).coefficient.item() == pytest.approx(COEFFICIENTS[name](ratio, advantage, p0))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_where_the_quadratic_rules_turn_around(advantage):
    """The optimum of SPO is r = 1 + sign(A) eps, that of DRPO p = p0 + sign(A) delta."""
    anchor = torch.tensor([math.log(0.4)], dtype=torch.float64)

    def coefficients(name: str, ratio: float) -> list[float]:
        ratios = [ratio - 0.01, ratio, ratio + 0.01]
        return [
            run(name, rule_input(anchor + math.log(r), anchor, torch.full_like(anchor, advantage))).coefficient.item()
            for r in ratios
        ]

    for name, optimum in (("spo", 1 + advantage * 0.3), ("drpo", (0.4 + advantage * 0.1) / 0.4)):
        before, at, after = coefficients(name, optimum)
        assert at == pytest.approx(0, abs=1e-12)
        assert before * advantage > 0
        assert after * advantage < 0


def test_at_ratio_one_the_smooth_rules_agree_with_the_policy_gradient():
    anchor = torch.full((3,), -1.0, dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    for name in ("spo", "drpo", "sapo", "vespo", "exact", "cispo"):
        assert run(name, rule_input(anchor, anchor, advantage)).coefficient.tolist() == pytest.approx([1, 1, 1]), name


def test_the_kernel_of_vespo_is_largest_at_k_over_lambda():
    anchor = torch.full((1001,), -9.0, dtype=torch.float64)
    ratio = torch.linspace(0.01, 3.0, 1001, dtype=torch.float64)
    for advantage, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        band = run("vespo", rule_input(anchor + ratio.log(), anchor, torch.full_like(ratio, advantage)))
        assert ratio[band.coefficient.argmax()].item() == pytest.approx(peak, abs=3e-3)


# ---- masks and extremes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_masked_tokens_do_nothing(name, dtype):
    zero = torch.zeros(2, dtype=dtype)
    band = run(name, rule_input(zero, zero, zero, torch.tensor([False, False])))
    assert (band.surrogate == 0).all()
    assert torch.isfinite(band.coefficient).all()
    assert not (band.removed | band.outside).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize(
    ("logp", "anchor"),
    [(-1.0, -701.0), (-701.0, -1.0), (0.0, -90.0), (-90.0, 0.0), (-1.0, -math.inf), (-math.inf, -1.0), (0.0, 0.0)],
)
@pytest.mark.parametrize("name", RULES)
def test_extreme_ratios_give_numbers(name, logp, anchor, advantage, dtype):
    current, before = torch.tensor([logp], dtype=dtype), torch.tensor([anchor], dtype=dtype)
    band = run(name, rule_input(current, before, torch.tensor([advantage], dtype=dtype)))
    assert torch.isfinite(band.coefficient).all()
    weight_is_one = name == "reinforce" or (name == "topr" and advantage > 0)
    two_sided = name == "cispo two-sided"
    if logp == -math.inf and advantage != 0 and (weight_is_one or two_sided):
        assert band.surrogate.item() == -math.copysign(math.inf, advantage)  # w A log 0
    else:
        assert torch.isfinite(band.surrogate).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["spo", "drpo"])
@pytest.mark.parametrize("anchor", [-5.0, -90.0, -701.0, -math.inf])
def test_a_quadratic_rule_pulls_back_however_far_the_token_went(anchor, name, dtype):
    current, before = torch.tensor([-1.0], dtype=dtype), torch.tensor([anchor], dtype=dtype)
    band = run(name, rule_input(current, before, torch.tensor([1.0], dtype=dtype)))
    assert band.coefficient.item() < 0
    assert band.outside.item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_vespo_overflows_for_no_parameters(dtype):
    log_w = torch.tensor([-700.0, -8.0, 0.0, 6.0, 12.0, 700.0], dtype=dtype)
    rule = VespoBoundary(k_positive=500.0, lambda_positive=0.1)
    x = rule_input(log_w - 800.0, torch.full_like(log_w, -800.0), torch.ones_like(log_w))
    assert torch.isfinite(soft_rules.vespo(rule, x).coefficient).all()
