import math
from dataclasses import dataclass

import pytest
import torch

from steadyrl.diagnostics.mismatch import (
    abs_quantiles,
    derived,
    extremes,
    max_abs,
    mismatch_sums,
    sequence_extremes,
    sequence_sums,
)
from steadyrl.types import add_sums, pooled

DELTA = [0.0, 0.3, -0.6, 0.05]
BEHAVIOR = [-1.0, -2.0, -1.5, -0.5]
MASK = torch.tensor([True, True, True, True, False])
BROKEN = [float("nan"), float("inf"), float("-inf"), -1e4, 1e4]


@dataclass(frozen=True)
class Responses:
    loss_mask: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int


def batch(garbage=float("nan"), dtype=torch.float64):
    behavior = torch.tensor([*BEHAVIOR, garbage], dtype=dtype)
    return behavior + torch.tensor([*DELTA, 0.0], dtype=dtype), behavior


def tensors(*rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def everywhere(size):
    return torch.ones(size, dtype=torch.bool)


def mean(function):
    return sum(function(d, math.exp(b + d), math.exp(b)) for d, b in zip(DELTA, BEHAVIOR, strict=True)) / 4


@pytest.mark.parametrize("garbage", BROKEN)
def test_every_statistic(garbage):
    means = pooled(mismatch_sums(*batch(garbage), MASK))
    assert means == pytest.approx(
        {
            "mismatch/d_bar": 0.95 / 4,
            "mismatch/delta": -0.25 / 4,
            "mismatch/delta_squared": (0.09 + 0.36 + 0.0025) / 4,
            "mismatch/k1": 0.25 / 4,
            "mismatch/k2": (0.09 + 0.36 + 0.0025) / 8,
            "mismatch/k3": mean(lambda d, p, p0: math.exp(d) - 1 - d),
            "mismatch/weight_token": mean(lambda d, p, p0: p / p0),
            "mismatch/chi2_token": mean(lambda d, p, p0: (p / p0) ** 2) - 1,
            "mismatch/tv_estimate": mean(lambda d, p, p0: abs(p / p0 - 1) / 2),
            "mismatch/tv_sampled": mean(lambda d, p, p0: abs(p - p0) / 2),
            "mismatch/probability_gap": mean(lambda d, p, p0: abs(p - p0)),
            "mismatch/binary_kl": mean(
                lambda d, p, p0: p0 * math.log(p0 / p) + (1 - p0) * math.log((1 - p0 + 1e-8) / (1 - p + 1e-8))
            ),
            "mismatch/tail_0.01": 3 / 4,
            "mismatch/tail_0.05": 2 / 4,  # 0.05 itself is rounded down on the way
            "mismatch/tail_0.1": 2 / 4,
            "mismatch/tail_0.5": 1 / 4,
            "mismatch/tail_ln2": 0.0,
            "mismatch/ratio_above_2": 0.0,
            "mismatch/ratio_below_0.5": 0.0,
            "mismatch/zero": 1 / 4,
            "mismatch/not_finite": 0.0,
        }
    )
    assert max_abs(*batch(garbage), MASK).item() == pytest.approx(0.6)


def test_tails_are_strict():
    delta = torch.tensor([0.1, 0.5, 0.50001], dtype=torch.float64)
    means = pooled(mismatch_sums(delta, torch.zeros(3), everywhere(3)))
    assert means["mismatch/tail_0.1"] == pytest.approx(2 / 3)
    assert means["mismatch/tail_0.5"] == pytest.approx(1 / 3)


def test_tails_by_side():
    logp, behavior = tensors([-1.0, -1.0, -3.0, -1.0], [-1.7, -1.8, -1.0, -1.69])
    means = pooled(mismatch_sums(logp, behavior, everywhere(4)))
    assert means["mismatch/ratio_above_2"] == 2 / 4  # ln 2 = 0.693
    assert means["mismatch/ratio_below_0.5"] == 1 / 4
    assert means["mismatch/tail_ln2"] == 3 / 4


def test_errors_of_opposite_sign_cancel_in_the_mean_only():
    logp, behavior = tensors([-0.9, -1.1], [-1.0, -1.0])
    means = pooled(mismatch_sums(logp, behavior, everywhere(2)))
    assert means["mismatch/delta"] == pytest.approx(0, abs=1e-15)
    assert means["mismatch/d_bar"] == pytest.approx(0.1)


def test_small_differences_of_float32_are_not_lost():
    behavior = torch.full((1000,), -8.0)
    logp = torch.nextafter(behavior, torch.zeros(1000))
    means = pooled(mismatch_sums(logp, behavior, everywhere(1000)))
    step = 2.0**-21  # spacing of float32 just below 8
    assert means["mismatch/d_bar"] == pytest.approx(step, rel=1e-12)
    assert means["mismatch/k3"] == pytest.approx(step**2 / 2, rel=1e-3)


@pytest.mark.parametrize("cut", range(6))
def test_parts_add_up_to_the_whole(cut):
    logp, behavior = batch()
    whole, total = mismatch_sums(logp, behavior, MASK), {}
    for part in (slice(0, cut), slice(cut, 5)):
        add_sums(total, mismatch_sums(logp[part], behavior[part], MASK[part]))
    assert pooled(total) == pytest.approx(pooled(whole))


def test_counts_pool_not_means():
    behavior = torch.full((16,), -1.0, dtype=torch.float64)
    logp = behavior.clone()
    logp[:3] += 0.2  # 3 of 12 tokens
    logp[12:15] += 0.2  # 3 of 4
    total = {}
    for part in (slice(0, 12), slice(12, 16)):
        add_sums(total, mismatch_sums(logp[part], behavior[part], everywhere(16)[part]))
    assert pooled(total)["mismatch/tail_0.1"] == 0.375


@pytest.mark.parametrize("size", [0, 5])
def test_no_active_token(size):
    nothing = torch.zeros(size, dtype=torch.bool)
    logp, behavior = (tensor[:size] for tensor in batch())
    assert all(value == 0 and count == 0 for value, count in mismatch_sums(logp, behavior, nothing).values())
    assert max_abs(logp, behavior, nothing).item() == 0
    worst = extremes(logp, behavior, nothing)
    assert (worst.max_abs_at.item(), worst.max_probability_gap_at.item()) == (-1, -1)
    assert all(math.isnan(value) for value in abs_quantiles(logp, behavior, nothing).values())
    layout = Responses(nothing, torch.zeros(size, dtype=torch.int64), 2)
    assert all(value == 0 and count == 0 for value, count in sequence_sums(logp, behavior, layout).values())
    assert [bound.item() for bound in sequence_extremes(logp, behavior, layout)] == [math.inf, -math.inf]
    assert all(math.isnan(value) for value in derived(pooled(mismatch_sums(logp, behavior, nothing))).values())


def test_everything_is_detached_float64():
    logp, behavior = batch(0.0, torch.float32)
    logp.requires_grad_()
    layout = Responses(MASK, torch.zeros(5, dtype=torch.int64), 1)
    for sums in (mismatch_sums(logp, behavior, MASK), sequence_sums(logp, behavior, layout)):
        for value, count in sums.values():
            assert value.dtype == count.dtype == torch.float64
            assert not value.requires_grad
    assert not max_abs(logp, behavior, MASK).requires_grad
    assert not any(value.requires_grad for value in abs_quantiles(logp, behavior, MASK).values())


def test_equal_inputs_give_exact_zeros_and_say_so():
    _, behavior = batch(0.0, torch.float32)
    layout = Responses(MASK, torch.zeros(5, dtype=torch.int64), 1)
    means = pooled({**mismatch_sums(behavior, behavior, MASK), **sequence_sums(behavior, behavior, layout)})
    means |= derived(means)
    ones = {"mismatch/zero", "mismatch/ppl_ratio"}  # the first says that nothing was measured
    ones |= {f"mismatch/{name}_{unit}" for name in ("weight", "ess") for unit in ("token", "sequence")}
    assert means == {name: float(name in ones) for name in means}
    assert ones < means.keys()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_an_active_token_that_is_not_finite_is_set_aside_and_counted(garbage, which):
    pair = batch(0.0)
    expected = pooled(mismatch_sums(*pair, MASK))
    pair[which][4] = garbage
    means = pooled(mismatch_sums(*pair, everywhere(5)))
    assert means.pop("mismatch/not_finite") == 1 / 5
    assert means == {name: value for name, value in expected.items() if name != "mismatch/not_finite"}
    worst = extremes(*pair, everywhere(5))
    assert (worst.max_abs.item(), worst.max_abs_at.item()) == (math.inf, 4)  # the token is named
    assert worst.max_probability_gap_at.item() == 2
    quantiles = abs_quantiles(*pair, everywhere(5))
    assert quantiles["mismatch/q99.9"].item() == pytest.approx(0.6)


@pytest.mark.parametrize("delta", [700.0, -700.0, 5000.0])
def test_extreme_ratios_stay_finite(delta):
    logp, behavior = tensors([-1.0, min(delta, 0.0)], [-1.0, min(-delta, 0.0)])
    layout = Responses(everywhere(2), torch.zeros(2, dtype=torch.int64), 1)
    means = pooled({**mismatch_sums(logp, behavior, layout.loss_mask), **sequence_sums(logp, behavior, layout)})
    assert all(math.isfinite(value) for value in {**means, **derived(means)}.values())
    assert means["mismatch/d_bar"] == abs(delta) / 2  # not clamped
    if delta > 0:
        assert means["mismatch/k3"] == pytest.approx((math.exp(20) - 21) / 2)
        assert means["mismatch/chi2_token"] == pytest.approx((math.exp(20) - 1) / 2)
        assert means["mismatch/chi2_sequence"] == pytest.approx(math.exp(20) - 1)
    else:
        assert means["mismatch/k3"] == pytest.approx(699 / 2)


def test_variance_and_effective_sample_size():
    logp, behavior = tensors([-1.0, -1.0, -1.0, -1.0], [-1.0, -1.0, -1.0, -1.0 - math.log(5)])  # weights 1, 1, 1, 5
    means = pooled(mismatch_sums(logp, behavior, everywhere(4)))
    values = derived(means)
    assert values["mismatch/ess_token"] == pytest.approx(8**2 / (4 * 28))
    assert values["mismatch/variance"] == pytest.approx(math.log(5) ** 2 * (1 / 4 - 1 / 16))
    assert values.keys() == {"mismatch/ess_token", "mismatch/variance"}  # no responses were given


def test_rounding_cannot_make_a_variance_negative_or_a_share_exceed_1():
    behavior = torch.zeros(7, dtype=torch.float64)
    for step in range(1, 30):
        means = pooled(mismatch_sums(behavior - 0.1 * step, behavior, everywhere(7)))
        values = derived(means)
        assert 0 <= values["mismatch/variance"] < 1e-14
        assert 1 - 1e-12 < values["mismatch/ess_token"] <= 1


def test_one_weight_that_dominates_leaves_one_effective_sample():
    logp = torch.zeros(10, dtype=torch.float64)
    behavior = torch.cat([torch.full((9,), 0.0), torch.full((1,), -9.9)])
    values = derived(pooled(mismatch_sums(logp, behavior, everywhere(10))))
    assert values["mismatch/ess_token"] == pytest.approx(1 / 10, rel=1e-2)


def test_unbiased_estimates_of_a_whole_distribution():
    """Drawn as often as mu says, the sampled statistics are the divergences of the distributions."""
    mu, pi = tensors([0.5, 0.25, 0.125, 0.125], [0.3, 0.3, 0.3, 0.1])
    drawn = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    means = pooled(mismatch_sums(pi.log()[drawn], mu.log()[drawn], everywhere(8)))
    kl = (mu * (mu / pi).log()).sum().item()
    assert means["mismatch/k1"] == pytest.approx(kl)
    assert means["mismatch/k3"] == pytest.approx(kl)
    assert means["mismatch/weight_token"] == pytest.approx(1)
    assert means["mismatch/chi2_token"] == pytest.approx(((pi - mu).square() / mu).sum().item())
    assert means["mismatch/tv_estimate"] == pytest.approx((pi - mu).abs().sum().item() / 2)


@pytest.mark.parametrize("garbage", BROKEN)
def test_sequences_by_hand(garbage):
    # lengths 2, 1, 0 and 1; sums of delta 0.3, -0.6, none, 0.05; one masked token inside the first response
    delta = [0.4, 0.0, -0.1, -0.6, 0.0, 0.05]
    mask = torch.tensor([True, False, True, True, False, True])
    behavior = torch.where(mask, -1.0, garbage).to(torch.float64)
    logp = torch.where(mask, behavior + torch.tensor(delta, dtype=torch.float64), garbage)
    layout = Responses(mask, torch.tensor([0, 0, 0, 1, 2, 3]), 4)
    means = pooled(sequence_sums(logp, behavior, layout))
    gaps, totals = [-0.15, 0.6, -0.05], [0.3, -0.6, 0.05]
    assert means == pytest.approx(
        {
            "mismatch/log_ppl_gap": sum(gaps) / 3,
            "mismatch/log_ppl_gap_abs": sum(abs(gap) for gap in gaps) / 3,
            "mismatch/ppl_ratio": sum(math.exp(gap) for gap in gaps) / 3,
            "mismatch/weight_sequence": sum(math.exp(total) for total in totals) / 3,
            "mismatch/chi2_sequence": sum(math.exp(2 * total) for total in totals) / 3 - 1,
            "mismatch/sequence_not_finite": 0.0,
        }
    )
    weights = [math.exp(total) for total in totals]
    ess = sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights))
    assert derived(means) == pytest.approx({"mismatch/ess_sequence": ess})
    lowest, highest = sequence_extremes(logp, behavior, layout)
    assert (lowest.item(), highest.item()) == pytest.approx((-0.15, 0.6))


def test_perplexity_of_a_worse_model_is_higher():
    logp, behavior = tensors([-2.0, -4.0], [-1.0, -2.0])
    means = pooled(sequence_sums(logp, behavior, Responses(everywhere(2), torch.zeros(2, dtype=torch.int64), 1)))
    assert means["mismatch/ppl_ratio"] == pytest.approx(math.exp(3) / math.exp(1.5))


def test_a_response_with_an_unknown_token_is_set_aside_as_a_whole():
    logp, behavior = tensors([-1.0, -1.0, -1.0], [-1.5, float("nan"), -0.9])
    layout = Responses(everywhere(3), torch.tensor([0, 0, 1]), 2)
    sums = sequence_sums(logp, behavior, layout)
    assert [part.item() for part in sums["mismatch/sequence_not_finite"]] == [1, 2]
    assert pooled(sums)["mismatch/log_ppl_gap"] == pytest.approx(0.1)
    assert [bound.item() for bound in sequence_extremes(logp, behavior, layout)] == pytest.approx([0.1, 0.1])


def test_responses_pool_over_any_cut_between_them():
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(12, generator=generator, dtype=torch.float64)
    logp = behavior + torch.randn(12, generator=generator, dtype=torch.float64) / 10
    sequence = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3])
    mask = torch.rand(12, generator=generator) < 0.8
    whole, total = sequence_sums(logp, behavior, Responses(mask, sequence, 4)), {}
    for part in (slice(0, 3), slice(3, 9), slice(9, 12)):
        inner = sequence[part] - sequence[part].min()
        layout = Responses(mask[part], inner, int(inner.max()) + 1)
        add_sums(total, sequence_sums(logp[part], behavior[part], layout))
    assert pooled(total) == pytest.approx(pooled(whole))


def test_extremes_name_their_tokens():
    # the largest log-ratio sits on a rare token, the largest change of probability on a frequent one
    logp, behavior = tensors([-9.0, -0.5, -1.0, -2.0], [-7.0, -0.1, -1.0, -99.0])
    worst = extremes(logp, behavior, torch.tensor([True, True, True, False]))
    assert (worst.max_abs.item(), worst.max_abs_at.item()) == (2.0, 0)
    assert worst.max_probability_gap.item() == pytest.approx(math.exp(-0.1) - math.exp(-0.5))
    assert worst.max_probability_gap_at.item() == 1


@pytest.mark.parametrize("size", [1, 2, 9, 10, 11, 1000, 1001])
def test_quantiles_are_order_statistics(size):
    generator = torch.Generator().manual_seed(size)
    delta = torch.randn(size, generator=generator, dtype=torch.float64)
    mask = torch.ones(size + 1, dtype=torch.bool)
    mask[size] = False
    logp = torch.cat([delta, delta.new_tensor([float("nan")])])
    found = abs_quantiles(logp, torch.zeros(size + 1), mask)
    values = sorted(delta.abs().tolist())
    for name, numerator, denominator in (("q50", 1, 2), ("q90", 9, 10), ("q99", 99, 100), ("q99.9", 999, 1000)):
        # the smallest value x for which the share of values <= x reaches alpha, counted in integers
        expected = next(x for i, x in enumerate(values, 1) if i * denominator >= numerator * size)
        assert found[f"mismatch/{name}"].item() == expected
