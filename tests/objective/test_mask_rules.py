"""Hard masks: value, gradient and counts against the published formulas, under autograd in float64."""

import math

import pytest
import torch
from torch import Tensor

from steadyrl.axes import (
    BandBoundary,
    DppoBoundary,
    IpoBoundary,
    KpopBoundary,
    M2poBoundary,
    TrpoBoundary,
    VacoBoundary,
)
from steadyrl.objective import mask_rules
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput

DTYPES = [torch.float32, torch.float64]
TOKENS = 500

RULES = {
    "band": BandBoundary(low=0.3, high=0.5),
    "dppo tv": DppoBoundary(divergence="tv", low=0.02, high=0.05, cap=1.5),
    "dppo kl": DppoBoundary(divergence="kl", low=0.01, high=0.02, cap=1.5),
    "dppo topk_tv": DppoBoundary(divergence="topk_tv", low=0.1, high=0.2, cap=1.5),
    "dppo topk_kl": DppoBoundary(divergence="topk_kl", low=0.2, high=0.1, cap=20.0),
    "dppo tv clip": DppoBoundary(divergence="tv", low=1e-3, high=2e-3, clip=0.2),
    "dppo kl clip": DppoBoundary(divergence="kl", low=0.02, high=0.02, clip=0.4),
    "ipo": IpoBoundary(threshold=0.06),
    "kpop": KpopBoundary(phi=0.01),
    "m2po": M2poBoundary(budget=0.04),
    "vaco": VacoBoundary(bound=0.2, cap=1.5),
    "trpo": TrpoBoundary(delta=0.12),
}
ONE_SIDED = ["dppo tv", "dppo kl", "dppo topk_tv", "dppo topk_kl", "dppo tv clip", "dppo kl clip", "vaco", "trpo"]
POLICY_GRADIENTS = ["band", "dppo tv", "dppo kl", "dppo topk_tv", "dppo topk_kl", "vaco"]


def run(name: str, x: RuleInput) -> BoundaryOutput:
    return getattr(mask_rules, RULES[name].rule)(RULES[name], x)


def layout_of(mask: Tensor) -> Layout:
    return Layout(mask, torch.zeros(len(mask), dtype=torch.int64), 1)


def random_input(sign: float | None, dtype: torch.dtype, seed: int = 0, masked: float = 0.0) -> RuleInput:
    """Tokens of all probabilities with heavy-tailed drift; masked ones as `policy_loss` presents them."""
    generator = torch.Generator().manual_seed(seed)
    anchor = -3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64) ** 2
    drift = 0.2 * torch.randn(TOKENS, generator=generator, dtype=torch.float64) ** 3
    logp = torch.minimum(anchor + drift, torch.tensor(-1e-4))
    advantage = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    if sign is not None:
        advantage = advantage.abs() * sign
    divergence = 0.3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    mask = torch.rand(TOKENS, generator=generator) >= masked
    logp, anchor, advantage, divergence = (
        torch.where(mask, value, 0.0).to(dtype) for value in (logp, anchor, advantage, divergence)
    )
    return RuleInput(logp - anchor, advantage, logp, anchor, layout_of(mask), divergence)


# ---- the published formulas, token by token ---------------------------------------------------------------


def bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def textbook(name: str, logp: Tensor, x: RuleInput) -> Tensor:
    """S of every token, differentiable in `logp`."""
    rule = RULES[name]
    anchor, advantage, divergence = x.anchor_logp.double(), x.advantage.double(), x.divergence.double()
    ratio = torch.exp(logp - anchor)
    p, p0 = torch.exp(logp).detach(), torch.exp(anchor)
    r = ratio.detach()
    if name == "band":
        f = torch.where((1 - rule.low < r) & (r < 1 + rule.high), r, 0.0)
        return f * advantage * logp
    if name.startswith("dppo"):
        if rule.divergence == "tv":
            drop_positive, drop_negative = p - p0 > rule.high, p - p0 < -rule.low
        else:
            if rule.divergence == "kl":
                rest0, rest = 1 - p0 + 1e-8, 1 - p + 1e-8
                divergence = p0 * (anchor - logp.detach()) + (1 - p0) * torch.log(rest0 / rest)
            drop_positive = (divergence > rule.high) & (p > p0)
            drop_negative = (divergence > rule.low) & (p < p0)
        mask = (~torch.where(advantage > 0, drop_positive, drop_negative)).double()
        if rule.clip is not None:
            clipped = torch.clamp(ratio, 1 - rule.clip, 1 + rule.clip)
            return mask * torch.min(ratio * advantage, clipped * advantage)
        return mask * torch.clamp(r, max=rule.cap) * advantage * logp
    if name == "ipo":
        return torch.where((p - p0).abs() <= rule.threshold, ratio * advantage, 0.0)
    if name == "kpop":
        p, p0 = p.clamp(1e-6, 1 - 1e-6), p0.clamp(1e-6, 1 - 1e-6)
        mask = (bernoulli_kl(p, p0) <= rule.phi) & (bernoulli_kl(p0, p) <= rule.phi)
        return torch.where(mask, ratio * advantage, 0.0)
    if name == "m2po":
        active = [t for t in range(len(r)) if x.layout.loss_mask[t]]
        squares = {t: math.log(r[t]) ** 2 for t in active}
        kept = sorted(active, key=squares.get)
        while len(kept) > 1 and sum(squares[t] for t in kept) / len(kept) >= rule.budget:
            kept.pop()
        mask = torch.zeros(len(r), dtype=torch.bool)
        mask[kept] = True
        return torch.where(mask, ratio * advantage, 0.0)
    outward = advantage * torch.log(r) > 0
    if name == "vaco":
        dropped = ((r - 1).abs() > rule.bound) & outward
        return torch.where(dropped, 0.0, torch.clamp(r, max=rule.cap) * advantage * logp)
    assert name == "trpo"
    return torch.where((divergence > rule.delta) & outward, 0.0, ratio * advantage)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("name", RULES)
def test_value_and_gradient_are_those_of_the_textbook(name, sign, dtype):
    x = random_input(sign, dtype)
    logp = x.logp.double().requires_grad_()
    expected = textbook(name, logp, x)
    (slope,) = torch.autograd.grad(expected.sum(), logp)
    band = run(name, x)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-6}
    assert band.surrogate.dtype == band.coefficient.dtype == dtype
    torch.testing.assert_close(band.surrogate.double(), expected.detach(), **tolerance)
    torch.testing.assert_close((band.coefficient * x.advantage).double(), slope, **tolerance)
    assert torch.equal(band.removed, (slope == 0) & (x.advantage != 0))
    if sign != 0:
        assert 0.01 < band.removed.double().mean() < 0.99  # or the case would prove little
    assert band.is_weight is (name in POLICY_GRADIENTS)


@pytest.mark.parametrize("name", RULES)
def test_what_is_removed_is_outside_and_on_one_side(name):
    x = random_input(None, torch.float64)
    band = run(name, x)
    assert (band.outside | ~band.removed).all()
    assert torch.equal(band.removed_low, band.removed & (x.log_ratio < 0))
    assert torch.equal(band.removed_high, band.removed & (x.log_ratio > 0))
    if name in ONE_SIDED:  # an update that pulls back is never removed
        assert not (band.removed & (x.advantage * x.log_ratio < 0)).any()
        assert (band.outside & ~band.removed).any()
    else:
        assert torch.equal(band.removed, band.outside)


@pytest.mark.parametrize("name", RULES)
def test_outside_does_not_look_at_the_advantage(name):
    positive, negative = random_input(1.0, torch.float64), random_input(-1.0, torch.float64)
    assert torch.equal(run(name, positive).outside, run(name, negative).outside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_masked_tokens_do_nothing(name, dtype):
    x = random_input(None, dtype, masked=0.4)
    band, mask = run(name, x), x.layout.loss_mask
    assert (band.surrogate[~mask] == 0).all()
    assert torch.isfinite(band.coefficient).all()
    assert not band.removed[~mask].any()
    assert not band.outside[~mask].any()
    alone = RuleInput(
        x.log_ratio[mask],
        x.advantage[mask],
        x.logp[mask],
        x.anchor_logp[mask],
        layout_of(mask[mask]),
        x.divergence[mask],
    )
    assert torch.equal(run(name, alone).coefficient, band.coefficient[mask])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize(
    ("logp", "anchor"),
    [(-1.0, -701.0), (-701.0, -1.0), (0.0, -90.0), (-90.0, 0.0), (-1.0, -math.inf), (-math.inf, -1.0), (0.0, 0.0)],
)
@pytest.mark.parametrize("name", RULES)
def test_extreme_ratios_give_numbers(name, logp, anchor, advantage, dtype):
    current, before = torch.tensor([logp], dtype=dtype), torch.tensor([anchor], dtype=dtype)
    x = RuleInput(
        current - before,
        torch.tensor([advantage], dtype=dtype),
        current,
        before,
        layout_of(torch.tensor([True])),
        torch.tensor([1.0], dtype=dtype),
    )
    band = run(name, x)
    assert torch.isfinite(band.surrogate).all()
    assert torch.isfinite(band.coefficient).all()


@pytest.mark.parametrize("name", RULES)
def test_an_empty_micro_batch(name):
    empty = torch.zeros(0)
    layout = Layout(empty.bool(), empty.long(), 0)
    assert run(name, RuleInput(empty, empty, empty, empty, layout, empty)).surrogate.shape == (0,)


# ---- conditions, one by one -------------------------------------------------------------------------------


def one(rule, ratio: float, p0: float, advantage: float, divergence: float | None = None) -> BoundaryOutput:
    anchor = torch.tensor([math.log(p0)], dtype=torch.float64)
    drift = torch.tensor([math.log(ratio)], dtype=torch.float64)
    x = RuleInput(
        drift,
        torch.tensor([advantage], dtype=torch.float64),
        anchor + drift,
        anchor,
        layout_of(torch.tensor([True])),
        None if divergence is None else torch.tensor([divergence], dtype=torch.float64),
    )
    return getattr(mask_rules, rule.rule)(rule, x)


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.69, False), (0.71, True), (1.0, True), (1.49, True), (1.51, False), (100.0, False)]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_double_sided_masking_is_exact_importance_sampling_inside_and_nothing_outside(ratio, kept, advantage):
    band = one(BandBoundary(low=0.3, high=0.5), ratio, 0.005, advantage)
    assert band.coefficient.item() == pytest.approx(ratio if kept else 0.0)
    assert band.outside.item() is not kept


@pytest.mark.parametrize("divergence", ["tv", "kl", "topk_tv", "topk_kl"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "side"),
    [(1.6, 1.0, "high"), (1.6, -1.0, None), (0.4, 1.0, None), (0.4, -1.0, "low"), (1.6, 0.0, None), (0.4, 0.0, None)],
)
def test_dppo_drops_what_is_far_and_outward(divergence, ratio, advantage, side):
    band = one(DppoBoundary(divergence=divergence, low=0.1, high=0.1), ratio, 0.6, advantage, divergence=0.2)
    assert band.outside.item()
    assert (band.removed_high.item(), band.removed_low.item()) == (side == "high", side == "low")
    assert band.coefficient.item() == pytest.approx(0.0 if side else ratio)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_token_that_the_anchor_excludes_is_far(divergence):
    logp, anchor = torch.tensor([-1.0]), torch.tensor([-math.inf])
    x = RuleInput(logp - anchor, torch.ones(1), logp, anchor, layout_of(torch.tensor([True])))
    assert mask_rules.dppo(DppoBoundary(divergence=divergence), x).removed_high.item()  # 0 log 0 is 0, not NaN


@pytest.mark.parametrize(("ratio", "weight"), [(1.2, 1.2), (30.0, 20.0)])
def test_the_weight_of_dppo_is_truncated(ratio, weight):
    assert one(DppoBoundary(), ratio, 0.001, 1.0).coefficient.item() == pytest.approx(weight)


def test_a_threshold_in_probability_leaves_rare_tokens_room():
    rare, frequent = (one(DppoBoundary(low=0.1, high=0.1), 1.5, p0, 1.0) for p0 in (0.01, 0.6))
    assert rare.coefficient.item() == pytest.approx(1.5)
    assert frequent.coefficient.item() == 0


def test_the_mask_times_the_clip_is_both():
    rule = DppoBoundary(low=0.1, high=0.1, clip=0.2)
    assert one(rule, 1.5, 0.01, 1.0).coefficient.item() == 0  # close in probability, outside the clip
    assert one(rule, 1.5, 0.01, 1.0).surrogate.item() == pytest.approx(1.2)
    assert one(rule, 1.15, 0.8, 1.0).coefficient.item() == 0  # inside the clip, far in probability
    assert one(rule, 1.15, 0.8, 1.0).surrogate.item() == 0
    assert one(rule, 1.05, 0.8, 1.0).coefficient.item() == pytest.approx(1.05)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_kpop_looks_both_ways(advantage):
    """With p0 = 0.02 and p = 0.2, KL(p0 || p) = 0.153 and KL(p || p0) = 0.298."""
    outputs = [one(KpopBoundary(phi=phi), 10.0, 0.02, advantage).coefficient.item() for phi in (0.1, 0.2, 0.3)]
    assert outputs == pytest.approx([0.0, 0.0, 10.0])
    back = [one(KpopBoundary(phi=phi), 0.1, 0.2, advantage).coefficient.item() for phi in (0.1, 0.2, 0.3)]
    assert back == pytest.approx([0.0, 0.0, 0.1])


@pytest.mark.parametrize("ratio", [1.3, 1 / 1.3])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_vaco_and_trpo_never_drop_an_update_that_pulls_back(ratio, advantage):
    outward = advantage * (ratio - 1) > 0
    for band in (one(VacoBoundary(), ratio, 0.3, advantage), one(TrpoBoundary(), ratio, 0.3, advantage, 0.2)):
        assert band.removed.item() is outward
        assert band.coefficient.item() == pytest.approx(0.0 if outward else ratio)
    assert one(TrpoBoundary(), ratio, 0.3, advantage, 0.1).coefficient.item() == pytest.approx(ratio)


# ---- M2PO -------------------------------------------------------------------------------------------------


def m2po_kept(drift: list[float], budget: float, mask: list[bool] | None = None) -> list[bool]:
    d = torch.tensor(drift, dtype=torch.float64)
    active = torch.tensor(mask or [True] * len(drift))
    x = RuleInput(d, active.double(), d - 1, torch.full_like(d, -1.0), layout_of(active))
    return (mask_rules.m2po(M2poBoundary(budget=budget), x).coefficient * active != 0).tolist()


def test_the_largest_are_dropped_until_the_mean_of_the_rest_is_below_the_budget():
    drift = [0.1, -0.5, 0.2, 0.0]  # squares 0.01 0.25 0.04 0; means from the smallest: 0, 0.005, 0.0167, 0.075
    assert m2po_kept(drift, 0.08) == [True, True, True, True]
    assert m2po_kept(drift, 0.07) == [True, False, True, True]
    assert m2po_kept(drift, 0.01) == [True, False, False, True]
    assert m2po_kept(drift, 0.004) == [False, False, False, True]


def test_one_token_is_kept_even_if_none_is_small():
    assert m2po_kept([3.0, -2.0, 5.0], 0.04) == [False, True, False]
    assert m2po_kept([2.0, 2.0, 2.0], 0.04) == [True, True, True]  # of one size
    assert m2po_kept([math.inf, -math.inf], 0.04) == [True, False]  # both kept; r = 0 has no gradient


def test_masked_tokens_do_not_enter_the_mean():
    mask = [True, False, False, False, True]
    assert m2po_kept([0.25, 0.0, 0.0, 0.0, 0.1], 0.03, mask) == [False, False, False, False, True]


def test_tokens_that_tie_with_a_dropped_one_are_dropped():
    assert m2po_kept([0.3, 0.1, -0.3, 0.1], 0.04) == [False, True, False, True]
    assert m2po_kept([-0.3, 0.1, 0.1, 0.3], 0.04) == [False, True, True, False]
