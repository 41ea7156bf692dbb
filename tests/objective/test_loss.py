import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from objective.batches import loss_of, make_batch, objective_of, threshold_of
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import LossOutput, policy_loss, trust_region_score
from steadyrl.objective.quantile import order_statistic
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts, add_sums, pooled

PRESETS = ["grpo", "gspo", "sat-grpo", "sat-gspo"]
AGGREGATIONS = ["token_mean", "sequence_mean"]
DTYPES = [torch.float32, torch.float64]


def objective(preset: str, **changes) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate({"preset": preset, **changes})


@dataclass(frozen=True)
class Case:
    """A batch of whole sequences, packed."""

    logp: Tensor
    behavior_logp: Tensor
    advantage: Tensor
    loss_mask: Tensor
    sequence: Tensor
    num_sequences: int
    reference_logp: Tensor

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(int(self.loss_mask.sum()), len(self.sequence[self.loss_mask].unique()))

    @property
    def layout(self) -> Layout:
        return Layout(self.loss_mask, self.sequence, self.num_sequences)

    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("logp", "behavior_logp", "advantage", "layout")}

    def score(self, config: ObjectiveConfig) -> Tensor:
        return trust_region_score(config, self.logp, self.behavior_logp, self.layout)


def random_case(lengths=(7, 1, 12, 4, 9, 2), *, seed=0, drift=0.25, masked=0.3, dtype=torch.float64) -> Case:
    """Sequences of these lengths, `masked` of their tokens (never the first) inactive, heavy-tailed drift."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    first = torch.cat([torch.tensor([True]), sequence[1:] != sequence[:-1]])
    mask = first | (torch.rand(total, generator=generator) > masked)
    anchor = -3 * torch.rand(total, generator=generator, dtype=torch.float64)
    noise = torch.randn(total, generator=generator, dtype=torch.float64) ** 3
    shift = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sequence]
    advantage = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    reference = anchor + 0.3 * torch.randn(total, generator=generator, dtype=torch.float64)
    return Case(
        logp=(anchor + drift * (noise + shift)).to(dtype).requires_grad_(),
        behavior_logp=anchor.to(dtype),
        advantage=advantage[sequence].to(dtype),
        loss_mask=mask,
        sequence=sequence,
        num_sequences=len(lengths),
        reference_logp=reference.to(dtype),
    )


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logp)[0]


def one_token(preset: str, drift: float, advantage: float, dtype=torch.float64, q: float | None = 0.02, **changes):
    """(loss output, dS/dr) of a single token with this log-ratio."""
    logp = torch.tensor([drift], dtype=dtype, requires_grad=True)
    out = policy_loss(
        objective(preset, **changes),
        logp=logp,
        behavior_logp=torch.zeros(1, dtype=dtype),
        advantage=torch.tensor([advantage], dtype=dtype),
        layout=Layout(torch.tensor([True]), torch.tensor([0]), 1),
        counts=BatchCounts(1, 1),
        threshold=None if q is None else torch.tensor(q, dtype=dtype),
    )
    return out, -gradient(out.loss, logp).item() / math.exp(drift)


# ---- golden numbers ---------------------------------------------------------------------------------------

VECTORS = [  # d, A, S, dS/dr at q = 0.02, radii 0.2 / 0.2
    (+0.02, +1, 1.020201, +1),
    (+0.02, -1, -1.020201, -1),
    (+0.03, +1, 1.030455, +1),
    (+0.03, -1, -1.030455, -1),
    (+0.05, +1, 1.027586, 0),
    (+0.05, -1, -1.051271, -1),
    (+0.10, +1, 1.007692, 0),
    (+0.10, -1, -1.105171, -1),
    (-0.05, +1, 0.951229, +1),
    (-0.05, -1, -0.972414, 0),
    (-0.30, +1, 0.740818, +1),
    (-0.30, -1, -0.999115, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", ["sat-grpo", "sat-gspo"])
@pytest.mark.parametrize(("d", "advantage", "surrogate", "slope"), VECTORS)
def test_vectors(d, advantage, surrogate, slope, preset, dtype):
    out, measured = one_token(preset, d, advantage, dtype)
    assert out.loss.item() == pytest.approx(-surrogate, abs=1e-6)
    assert measured == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("d", "c_low", "c_high"),
    [
        (+0.02, 1, 1),
        (+0.03, 1, 0.307692),
        (+0.05, 1, 0.137931),
        (+0.10, 1, 0.038462),
        (-0.05, 0.137931, 1),
        (-0.30, 0.004425, 1),
    ],
)
def test_vectors_of_the_contraction(d, c_low, c_high):
    out, _ = one_token("sat-grpo", d, 1.0)
    means = pooled(out.sums)
    assert means["sat/radius_low"] == pytest.approx(0.2 * c_low, abs=1e-6)
    assert means["sat/radius_high"] == pytest.approx(0.2 * c_high, abs=1e-6)
    assert out.extremes["sat/min_contraction"].item() == pytest.approx(min(c_low, c_high), abs=1e-6)
    assert means["sat/q"] == pytest.approx(0.02)


def test_plain_clip_saturates_where_the_vectors_say():
    out, slope = one_token("grpo", -0.30, -1.0)
    assert out.loss.item() == pytest.approx(0.8)
    assert slope == 0


# ---- textbook oracles -------------------------------------------------------------------------------------


def textbook_loss(config: ObjectiveConfig, case: Case, q: float | None, reference: bool) -> Tensor:
    """The published formulas, sequence by sequence, for autograd; nothing of ours but the numbers."""
    per_sequence = []
    for b in range(case.num_sequences):
        active = (case.sequence == b) & case.loss_mask
        log_ratio = case.logp[active] - case.behavior_logp[active]
        if config.unit == "sequence":
            log_ratio = log_ratio.mean().expand(len(log_ratio))
        low = torch.full_like(log_ratio, config.boundary.low).detach()
        high = torch.full_like(log_ratio, config.boundary.high).detach()
        if q is not None and q > 0:
            for t, d in enumerate(log_ratio.detach().tolist()):
                if abs(d) > q:
                    radius = high if d > 0 else low
                    radius[t] = radius[t] / (1 + (abs(d) / q) ** 2)
        ratio = torch.exp(log_ratio)
        advantage = case.advantage[active]
        clipped = torch.max(torch.min(ratio, 1 + high), 1 - low)
        terms = -torch.min(ratio * advantage, clipped * advantage)
        if reference:
            x = case.reference_logp[active] - case.logp[active]
            terms = terms + config.kl_coef * (torch.exp(x) - x - 1)
        per_sequence.append(terms)
    if config.aggregation == "token_mean":
        return torch.cat(per_sequence).mean()
    return torch.stack([terms.mean() for terms in per_sequence]).mean()


def textbook_quantile(config: ObjectiveConfig, case: Case) -> float:
    scores = []
    for b in range(case.num_sequences):
        active = (case.sequence == b) & case.loss_mask
        log_ratio = (case.logp[active] - case.behavior_logp[active]).tolist()
        if config.unit == "sequence":
            log_ratio = [sum(log_ratio) / len(log_ratio)] * len(log_ratio)
        scores += [abs(d) for d in log_ratio]
    return next(x for x in sorted(scores) if 10 * sum(y <= x for y in scores) >= 9 * len(scores))


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_value_and_gradient_are_those_of_the_textbook(preset, aggregation, reference, seed):
    config = objective(preset, aggregation=aggregation, kl_coef=0.1)
    # 25 sequences: for a sequence to be gated, those beyond it must hold less than a tenth of the tokens
    case = random_case([3, 9, 1, 14, 6] * 5, seed=seed)
    is_sat = preset.startswith("sat")
    out = policy_loss(
        config,
        **case.arguments(),
        counts=case.counts,
        reference_logp=case.reference_logp if reference else None,
    )
    expected = textbook_loss(config, case, textbook_quantile(config, case) if is_sat else None, reference)
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(out.loss, case.logp), gradient(expected, case.logp), rtol=1e-10, atol=1e-13)
    means = pooled(out.sums)
    assert means["objective/clip_low"] + means["objective/clip_high"] > 0  # or the case would prove little
    if is_sat:
        assert means["sat/gate_rate"] > 0
        assert means["sat/q"] == pytest.approx(textbook_quantile(config, case))


def test_no_gradient_flows_through_the_radii():
    """An oracle whose radii are *not* detached has another gradient; ours must be the detached one."""
    config = objective("sat-grpo", aggregation="token_mean")
    case = random_case([20] * 8, drift=0.05, masked=0.0, seed=3)
    d = case.logp - case.behavior_logp
    q = order_statistic(d.abs(), case.loss_mask, 0.9)
    ours = gradient(policy_loss(config, **case.arguments(), counts=case.counts).loss, case.logp)

    def leaky(drift: Tensor) -> Tensor:
        c = torch.where(drift.abs() > q, 1 / (1 + (drift.abs() / q) ** 2), 1.0)
        c_low, c_high = torch.where(drift < 0, c, 1.0), torch.where(drift > 0, c, 1.0)
        clipped = torch.max(torch.min(d.exp(), 1 + 0.2 * c_high), 1 - 0.2 * c_low)
        return -torch.min(d.exp() * case.advantage, clipped * case.advantage).mean()

    torch.testing.assert_close(ours, gradient(leaky(d.detach()), case.logp))
    assert not torch.allclose(ours, gradient(leaky(d), case.logp))


# ---- every unit and aggregation ---------------------------------------------------------------------------


SURROGATES = {  # by rule: the value for autograd, from the log-ratio of the unit, the token's logp and A
    "clip": lambda x, logp, a: torch.min(x.exp() * a, x.exp().clamp(0.8, 1.2) * a),
    "spo": lambda x, logp, a: x.exp() * a - a.abs() / 0.4 * (x.exp() - 1) ** 2,
    "sapo": lambda x, logp, a: (
        torch.where(a > 0, 4 * torch.sigmoid(x.exp() - 1), 4 / 1.05 * torch.sigmoid(1.05 * (x.exp() - 1))) * a
    ),
    "cispo": lambda x, logp, a: x.detach().exp().clamp(max=5.0) * a * logp,
    "topr": lambda x, logp, a: torch.where(a > 0, 1.0, x.detach().exp().clamp(max=1.0)) * a * logp,
    "vespo": lambda x, logp, a: (
        torch.where(a >= 0, 2 * x + 3 * (1 - x.exp()), 3 * x + 2 * (1 - x.exp())).exp().detach() * a * logp
    ),
}


def textbook_of_unit(config: ObjectiveConfig, case: Case) -> Tensor:
    """The objective response by response: one ratio and one term for each, a term for each token otherwise."""
    terms = []
    for b in range(case.num_sequences):
        active = (case.sequence == b) & case.loss_mask
        logp, advantage = case.logp[active], case.advantage[active]
        d = logp - case.behavior_logp[active]
        x = {
            "token": d,
            "sequence": d.mean().expand(len(d)),
            "sequence_token": d.mean().detach() + logp - logp.detach(),  # GSPO-token: sg[rho] exp(logp - sg[logp])
            "product": d.sum().expand(len(d)),
        }[config.unit]
        terms.append(SURROGATES[config.boundary.rule](x, logp, advantage))
    if config.aggregation == "token_mean":
        return -torch.cat(terms).mean()
    if config.aggregation == "sequence_mean":
        return -torch.stack([term.mean() for term in terms]).mean()
    total = torch.stack([term.sum() for term in terms]).mean()
    return -total if config.aggregation == "sequence_sum" else -total / config.aggregation_tokens


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize(
    ("unit", "rule"),
    [
        (unit, rule)
        for unit in ("token", "sequence", "sequence_token", "product")
        for rule in SURROGATES
        if rule != "vespo" or unit == "product"
    ],
)
def test_every_unit_has_the_gradient_of_its_response_level_formula(unit, rule, aggregation):
    config = ObjectiveConfig.model_validate(
        {
            "unit": unit,
            "boundary": {"rule": rule},
            "aggregation": aggregation,
            "aggregation_tokens": 7 if aggregation == "constant" else None,
        }
    )
    case = random_case((5, 1, 9, 3), drift=0.1, seed=11)
    if unit in ("token", "sequence_token"):  # these may have an advantage for each token
        noise = torch.randn(18, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        case = replace(case, advantage=case.advantage + noise)
    out = policy_loss(config, **case.arguments(), counts=case.counts)
    expected = textbook_of_unit(config, case)
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(out.loss, case.logp), gradient(expected, case.logp), rtol=1e-10, atol=1e-13)


# ---- independence of the cut ------------------------------------------------------------------------------


def cut(case: Case, groups: list[list[int]], padding: int) -> list[tuple[Case, Tensor]]:
    """Micro-batches of whole sequences, each followed by `padding` masked tokens of garbage, and their positions."""
    parts = []
    for group in groups:
        index = torch.cat([torch.nonzero(case.sequence == b)[:, 0] for b in group])
        rows = torch.cat([torch.full((int((case.sequence == b).sum()),), i) for i, b in enumerate(group)])
        junk = torch.full((padding,), float("nan"), dtype=case.logp.dtype)
        part = Case(
            logp=torch.cat([case.logp[index], junk]),
            behavior_logp=torch.cat([case.behavior_logp[index], junk]),
            advantage=torch.cat([case.advantage[index], junk]),
            loss_mask=torch.cat([case.loss_mask[index], torch.zeros(padding, dtype=torch.bool)]),
            sequence=torch.cat([rows, torch.full((padding,), len(group) - 1)]),
            num_sequences=len(group),
            reference_logp=torch.cat([case.reference_logp[index], junk]),
        )
        parts.append((part, index))
    return parts


def total(config: ObjectiveConfig, case: Case, groups: list[list[int]], padding: int):
    """Loss, gradient and pooled statistics of a batch that is trained on in these micro-batches."""
    scores = []
    for part, _ in cut(case, groups, padding):
        scores.append(part.score(config)[part.loss_mask])
    scores = torch.cat(scores)
    q = order_statistic(scores, torch.ones_like(scores, dtype=torch.bool), 0.9)
    loss, sums = 0.0, {}
    for part, _ in cut(case, groups, padding):
        out = policy_loss(
            config, **part.arguments(), counts=case.counts, threshold=q, reference_logp=part.reference_logp
        )
        loss = loss + out.loss
        add_sums(sums, out.sums)
    return loss.detach(), gradient(loss, case.logp), pooled(sums)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    "groups", [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3, 4], [5]], [[5, 1], [4, 0, 3], [2]], [[5, 4, 3, 2, 1, 0]]]
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_cut_of_the_batch_changes_nothing(preset, aggregation, groups, padding):
    config = objective(preset, aggregation=aggregation, kl_coef=0.1)
    case = random_case((2, 30, 1, 17, 9, 25), seed=4)
    loss, grad, means = total(config, case, [[0, 1, 2, 3, 4, 5]], 0)
    cut_loss, cut_grad, cut_means = total(config, case, groups, padding)
    torch.testing.assert_close(cut_loss, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(cut_grad, grad, rtol=1e-12, atol=1e-14)
    assert cut_means == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_single_micro_batch_takes_its_own_quantile(preset):
    config = objective(preset)
    case = random_case(seed=5)
    q = order_statistic(case.score(config), case.loss_mask, 0.9)
    own = policy_loss(config, **case.arguments(), counts=case.counts)
    given = policy_loss(config, **case.arguments(), counts=case.counts, threshold=q)
    assert torch.equal(own.loss, given.loss)
    assert torch.equal(gradient(own.loss, case.logp), gradient(given.loss, case.logp))


# ---- masks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), -1e4, 1e4])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_masked_tokens_hold_changes_nothing(preset, garbage, dtype):
    config = objective(preset)
    case = random_case(seed=6, dtype=dtype)

    def run(fill: float) -> tuple[LossOutput, Tensor]:
        swap = {
            name: torch.where(case.loss_mask, getattr(case, name).detach(), fill)
            for name in ("logp", "behavior_logp", "advantage", "reference_logp")
        }
        filled = replace(case, **(swap | {"logp": swap["logp"].requires_grad_()}))
        out = policy_loss(config, **filled.arguments(), counts=case.counts, reference_logp=filled.reference_logp)
        return out, gradient(out.loss, filled.logp)

    clean, clean_grad = run(-1.0)
    out, grad = run(garbage)
    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(grad, clean_grad)
    assert torch.isfinite(grad).all()
    assert (grad[~case.loss_mask] == 0).all()
    assert pooled(out.sums) == pooled(clean.sums)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_no_active_token_gives_a_zero_that_can_be_differentiated(preset, reference):
    case = replace(random_case(), loss_mask=torch.zeros(35, dtype=torch.bool))
    case = replace(case, logp=torch.full((35,), float("nan"), requires_grad=True))
    out = policy_loss(
        objective(preset),
        **case.arguments(),
        counts=BatchCounts(100, 10),
        reference_logp=case.reference_logp if reference else None,
    )
    assert out.loss.item() == 0
    assert torch.equal(gradient(out.loss, case.logp), torch.zeros(35))
    assert all(count == 0 and value == 0 for value, count in out.sums.values())
    assert all(value == 1 for value in out.extremes.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_an_empty_micro_batch(preset):
    empty = torch.zeros(0, requires_grad=True)
    out = policy_loss(
        objective(preset),
        logp=empty,
        behavior_logp=torch.zeros(0),
        advantage=torch.zeros(0),
        layout=Layout(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 0),
        counts=BatchCounts(4, 2),
    )
    out.loss.backward()
    assert out.loss.item() == 0


@pytest.mark.parametrize("preset", ["sat-grpo", "sat-gspo"])
def test_a_single_token_is_its_own_quantile_and_is_not_gated(preset):
    out, slope = one_token(preset, 0.1, 1.0, q=None)
    assert slope == pytest.approx(1.0)
    assert pooled(out.sums)["sat/gate_rate"] == 0
    assert out.extremes["sat/min_contraction"] == 1


# ---- relations --------------------------------------------------------------------------------------------


def test_gspo_at_ratio_one_weighs_a_short_and_a_long_response_alike():
    logp = torch.tensor([-1.0, -2.0, -0.5, -0.1], requires_grad=True)
    out = policy_loss(
        objective("gspo"),
        logp=logp,
        behavior_logp=logp.detach(),
        advantage=torch.tensor([1.0, -1.0, -1.0, -1.0]),
        layout=Layout(torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 1, 1]), 2),
        counts=BatchCounts(4, 2),
    )
    assert out.loss.item() == pytest.approx(0, abs=1e-7)
    assert gradient(out.loss, logp).tolist() == pytest.approx([-1 / 2, 1 / 6, 1 / 6, 1 / 6])


@pytest.mark.parametrize(("preset", "plain"), [("sat-grpo", "grpo"), ("sat-gspo", "gspo")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q", [0.0, 1e6])
def test_a_gate_that_never_fires_is_the_plain_clip_to_the_bit(preset, plain, q, dtype):
    case = random_case(dtype=dtype, seed=7, drift=1.0)
    sat = policy_loss(objective(preset), **case.arguments(), counts=case.counts, threshold=torch.tensor(q, dtype=dtype))
    base = policy_loss(objective(plain), **case.arguments(), counts=case.counts)
    assert torch.equal(sat.loss, base.loss)
    assert torch.equal(gradient(sat.loss, case.logp), gradient(base.loss, case.logp))
    for name, value in pooled(base.sums).items():
        assert pooled(sat.sums)[name] == value
    means = pooled(sat.sums)
    assert means["sat/gate_rate"] == 0
    assert means["sat/intervention_rate"] == 0
    assert sat.extremes["sat/min_contraction"] == 1


def test_nine_tenths_of_exact_zeros_turn_the_gate_off():
    drift = torch.tensor([0.0] * 9 + [0.5], requires_grad=True)
    out = policy_loss(
        objective("sat-grpo"),
        logp=drift,
        behavior_logp=torch.zeros(10),
        advantage=torch.ones(10),
        layout=Layout(torch.ones(10, dtype=torch.bool), torch.zeros(10, dtype=torch.int64), 1),
        counts=BatchCounts(10, 1),
    )
    assert pooled(out.sums)["sat/q"] == 0
    assert pooled(out.sums)["sat/gate_rate"] == 0


@pytest.mark.parametrize("n", [1, 7, 10, 99, 100, 1003])
def test_at_most_a_tenth_of_distinct_values_is_gated(n):
    case = random_case((n,), masked=0.0, seed=8)
    out = policy_loss(objective("sat-grpo"), **case.arguments(), counts=case.counts)
    assert case.score(objective("sat-grpo")).unique().numel() == n
    gated = out.sums["sat/gate_rate"][0].item()
    assert gated == n // 10


def test_the_sequence_quantile_weighs_responses_by_their_length():
    """One response of 8 tokens and two of 1: the ninth of ten tokens is the second largest response."""
    drift = torch.tensor([0.01] * 8 + [-0.2, 0.4], dtype=torch.float64, requires_grad=True)
    sequence = torch.tensor([0] * 8 + [1, 2])
    config = objective("sat-gspo")
    mask = torch.ones(10, dtype=torch.bool)
    score = trust_region_score(config, drift, torch.zeros(10, dtype=torch.float64), Layout(mask, sequence, 3))
    assert score.tolist() == pytest.approx([0.01] * 8 + [0.2, 0.4])
    assert order_statistic(score, mask, 0.9).item() == pytest.approx(0.2)
    assert not score.requires_grad


# ---- every rule -------------------------------------------------------------------------------------------


RULES = {
    "clip": {"rule": "clip", "dual": 3.0},
    "sat": {"rule": "sat"},
    "band": {"rule": "band", "low": 0.2, "high": 0.4},
    "dppo tv": {"rule": "dppo", "low": 0.05, "high": 0.05},
    "dppo kl": {"rule": "dppo", "divergence": "kl", "low": 0.02, "high": 0.02},
    "dppo topk_tv": {"rule": "dppo", "divergence": "topk_tv"},
    "dppo clip": {"rule": "dppo", "low": 1e-3, "high": 1e-3, "clip": 0.2},
    "ipo": {"rule": "ipo"},
    "kpop": {"rule": "kpop", "phi": 0.01},
    "m2po": {"rule": "m2po"},
    "vaco": {"rule": "vaco"},
    "trpo": {"rule": "trpo"},
    "importance": {"rule": "importance"},
    "truncated": {"rule": "importance", "cap": 1.2},
    "reinforce": {"rule": "importance", "weighted": False},
    "cispo": {"rule": "cispo"},
    "spo": {"rule": "spo"},
    "drpo": {"rule": "drpo"},
    "sapo": {"rule": "sapo"},
    "vespo": {"rule": "vespo"},
    "unbounded_positive": {"rule": "unbounded_positive"},
    "topr": {"rule": "topr"},
}


def of_rule(name: str, **changes) -> ObjectiveConfig:
    """An objective with this rule, in the unit that it is made for."""
    unit = "product" if name == "vespo" else "token"
    return ObjectiveConfig.model_validate({"unit": unit, "boundary": RULES[name], **changes})


def divergence_of(case: Case) -> Tensor:
    return ((case.logp.detach() - case.behavior_logp).abs() / 4).to(case.logp.dtype)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name in RULES if name != "m2po"])  # its budget is one micro-batch's
def test_the_cut_of_the_batch_changes_nothing_for_any_rule(name, aggregation):
    config = of_rule(name, aggregation=aggregation)
    case = random_case((2, 30, 1, 17, 9, 25), seed=4, drift=0.1)
    q = torch.tensor(0.1)

    def run(part: Case) -> LossOutput:
        return policy_loss(config, **part.arguments(), counts=case.counts, divergence=divergence_of(part), threshold=q)

    whole = run(case)
    parts = [run(part) for part, _ in cut(case, [[5, 1], [4, 0, 3], [2]], padding=3)]
    loss, sums = sum(part.loss for part in parts), {}
    for part in parts:
        add_sums(sums, part.sums)
    torch.testing.assert_close(loss, whole.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(loss, case.logp), gradient(whole.loss, case.logp), rtol=1e-12, atol=1e-14)
    assert pooled(sums) == pytest.approx(pooled(whole.sums), rel=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), -1e4])
@pytest.mark.parametrize("name", RULES)
def test_what_masked_tokens_hold_changes_nothing_for_any_rule(name, garbage):
    case = random_case(seed=6, dtype=torch.float32)

    def run(fill: float) -> tuple[LossOutput, Tensor]:
        fields = {"divergence": divergence_of(case)}
        fields |= {field: getattr(case, field).detach() for field in ("logp", "behavior_logp", "advantage")}
        fields = {field: torch.where(case.loss_mask, value, fill) for field, value in fields.items()}
        logp = fields.pop("logp").requires_grad_()
        out = policy_loss(of_rule(name), logp=logp, **fields, layout=case.layout, counts=case.counts)
        return out, gradient(out.loss, logp)

    (clean, clean_grad), (out, grad) = run(-1.0), run(garbage)
    assert torch.equal(out.loss, clean.loss)
    assert torch.equal(grad, clean_grad)
    assert torch.isfinite(grad).all()
    assert (grad[~case.loss_mask] == 0).all()
    assert pooled(out.sums) == pooled(clean.sums)


@pytest.mark.parametrize("name", RULES)
def test_no_active_token_is_a_zero_that_can_be_differentiated_for_any_rule(name):
    for size in (0, 3):
        logp = torch.full((size,), float("nan"), requires_grad=True)
        other = torch.full((size,), float("nan"))
        layout = Layout(torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64), 1)
        out = policy_loss(
            of_rule(name),
            logp=logp,
            behavior_logp=other,
            advantage=other,
            layout=layout,
            counts=BatchCounts(4, 2),
            divergence=other,
        )
        assert out.loss.item() == 0
        assert torch.equal(gradient(out.loss, logp), torch.zeros(size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_extreme_ratios_and_missing_advantages_give_numbers(name, dtype):
    logp = torch.tensor([-1.0, -701.0, -0.5, -90.0, -2.0, -1.0], dtype=dtype, requires_grad=True)
    behavior = torch.tensor([-701.0, -1.0, -90.0, -0.5, -2.0, -math.inf], dtype=dtype)
    sequence = torch.arange(6)
    layout = Layout(torch.ones(6, dtype=torch.bool), sequence, 6)
    for advantage in (1.0, -1.0, 0.0):
        out = policy_loss(
            of_rule(name),
            logp=logp,
            behavior_logp=behavior,
            advantage=torch.full((6,), advantage, dtype=dtype),
            layout=layout,
            counts=BatchCounts(6, 6),
            divergence=torch.ones(6, dtype=dtype),
        )
        assert torch.isfinite(out.loss)
        assert torch.isfinite(gradient(out.loss, logp)).all()
        assert out.loss.item() == 0 or advantage != 0


@pytest.mark.parametrize("name", RULES)
def test_at_lag_zero_every_rule_is_the_policy_gradient(name):
    """All ratios exactly 1: nothing is removed and the gradient is -A over the number of tokens."""
    case = random_case(seed=12)
    case = replace(case, logp=case.behavior_logp.clone().requires_grad_())
    zero = torch.zeros_like(case.behavior_logp)
    out = policy_loss(of_rule(name), **case.arguments(), counts=case.counts, divergence=zero)
    expected = torch.where(case.loss_mask, -case.advantage / case.counts.num_tokens, 0.0)
    torch.testing.assert_close(gradient(out.loss, case.logp), expected)
    means = pooled(out.sums)
    assert means["objective/clip_low"] == means["objective/clip_high"] == means["objective/outside_band"] == 0


# ---- rules that become each other -------------------------------------------------------------------------


def assert_same(
    one: ObjectiveConfig, other: ObjectiveConfig, case: Case, *, value: bool = True, exact: bool = False, **arguments
) -> None:
    ours = policy_loss(one, **case.arguments(), counts=case.counts, **arguments)
    theirs = policy_loss(other, **case.arguments(), counts=case.counts, **arguments)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-10, "atol": 1e-14}
    if value:
        torch.testing.assert_close(ours.loss, theirs.loss, **tolerance)
    torch.testing.assert_close(gradient(ours.loss, case.logp), gradient(theirs.loss, case.logp), **tolerance)


def rule(unit: str = "token", **boundary) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate({"unit": unit, "boundary": boundary})


EXACT = rule(rule="importance")
HUGE = 1e30


@pytest.mark.parametrize("unit", ["token", "sequence", "product"])
def test_sat_that_contracts_by_one_is_ppo(unit):
    case = random_case(seed=13)
    assert_same(rule(unit, rule="sat", kernel="const", strength=1.0), rule(unit, rule="clip"), case, exact=True)


def test_sat_with_the_zero_kernel_removes_every_outward_gradient_of_the_tail():
    case = random_case([20] * 4, seed=14, masked=0.0)
    d = case.logp - case.behavior_logp
    q = order_statistic(d.detach().abs(), case.loss_mask, 0.9)
    tail = d.abs() > q
    lower = torch.where(tail & (d < 0), 1.0, torch.full_like(d, 0.8))
    upper = torch.where(tail & (d > 0), 1.0, torch.full_like(d, 1.2))
    clipped = torch.max(torch.min(d.exp(), upper), lower)
    expected = -torch.min(d.exp() * case.advantage, clipped * case.advantage).mean()
    out = policy_loss(rule(rule="sat", kernel="zero"), **case.arguments(), counts=case.counts)
    grad = gradient(out.loss, case.logp)
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, gradient(expected, case.logp), rtol=1e-12, atol=1e-15)
    outward = tail & (d * case.advantage > 0)
    assert outward.any()
    assert (grad[outward] == 0).all()


@pytest.mark.parametrize(
    "limit",
    [
        {"rule": "dppo", "divergence": "tv", "low": HUGE, "high": HUGE, "cap": HUGE},
        {"rule": "dppo", "divergence": "kl", "low": HUGE, "high": HUGE, "cap": HUGE},
        {"rule": "cispo", "low": 1.0, "high": HUGE},
        {"rule": "cispo", "low": 2.0, "high": HUGE},
        {"rule": "importance", "cap": HUGE},
        {"rule": "vaco", "bound": HUGE, "cap": HUGE},
        {"rule": "band", "low": HUGE, "high": HUGE},
    ],
)
def test_rules_without_their_limit_are_exact_importance_sampling(limit):
    assert_same(rule(**limit), EXACT, random_case(seed=15))


@pytest.mark.parametrize(
    "limit",
    [
        {"rule": "drpo", "delta": HUGE},
        {"rule": "spo", "eps": HUGE},
        {"rule": "ipo", "threshold": HUGE},
        {"rule": "kpop", "phi": HUGE},
        {"rule": "m2po", "budget": HUGE},
        {"rule": "trpo", "delta": HUGE},
        {"rule": "clip", "low": 1.0, "high": HUGE},
    ],
)
def test_surrogates_without_their_limit_have_the_gradient_of_exact_importance_sampling(limit):
    case = random_case(seed=15)
    assert_same(rule(**limit), EXACT, case, value=False, divergence=divergence_of(case))
    ratio = torch.exp(case.logp - case.behavior_logp)
    expected = -(ratio * case.advantage)[case.loss_mask].mean()
    out = policy_loss(rule(**limit), **case.arguments(), counts=case.counts, divergence=divergence_of(case))
    torch.testing.assert_close(out.loss, expected, rtol=1e-10, atol=0)


def test_double_sided_masking_is_exact_importance_sampling_on_fewer_tokens():
    case = random_case(seed=16)
    inside = (case.logp - case.behavior_logp).exp()
    inside = (inside > 0.8) & (inside < 1.4)
    grad = gradient(policy_loss(of_rule("band"), **case.arguments(), counts=case.counts).loss, case.logp)
    exact = gradient(policy_loss(EXACT, **case.arguments(), counts=case.counts).loss, case.logp)
    assert (inside & case.loss_mask).any()
    assert (~inside & case.loss_mask).any()
    torch.testing.assert_close(grad, torch.where(inside, exact, 0.0))


@pytest.mark.parametrize("other", [{"kind": "tis", "cap": HUGE}, {"kind": "icepop", "low": 0.0, "high": HUGE}])
def test_corrections_without_a_bound_are_decoupled_ppo(other):
    case = random_case(seed=17)
    old = case.behavior_logp + 0.3 * torch.randn(35, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one, plain = (
        ObjectiveConfig.model_validate({"anchor": "old_actor", "correction": correction})
        for correction in (other, {"kind": "decoupled"})
    )
    assert_same(one, plain, case, old_logp=old)


def test_an_unbounded_correction_of_an_unbounded_ratio_is_exact_importance_sampling():
    case = random_case(seed=18)
    old = case.behavior_logp + 0.3 * torch.randn(35, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    through_old = ObjectiveConfig.model_validate(
        {"anchor": "old_actor", "boundary": {"rule": "importance"}, "correction": {"kind": "tis", "cap": HUGE}}
    )
    assert_same(through_old, EXACT, case, old_logp=old)


@pytest.mark.parametrize("correction", [None, {"kind": "decoupled"}])
@pytest.mark.parametrize("age", [0, 1])
def test_the_interpolated_anchor_at_age_one_is_the_engine(age, correction):
    case = random_case(seed=19)
    proximal = ObjectiveConfig.model_validate({"anchor": "prox_approx", "correction": correction})
    assert_same(proximal, rule(rule="clip"), case, exact=True, age=torch.full((35,), age))


def test_the_interpolated_anchor_at_a_later_age():
    """x = r^(1/age), w = r^(1 - 1/age): unclipped, the gradient is that of the whole ratio."""
    case = random_case(seed=19, drift=0.02)
    config = ObjectiveConfig.model_validate(
        {
            "anchor": "prox_approx",
            "boundary": {"rule": "clip", "low": 0.9, "high": 9.0},
            "correction": {"kind": "decoupled"},
        }
    )
    assert_same(config, EXACT, case, value=False, age=torch.full((35,), 4))


@pytest.mark.parametrize("boundary", [{"rule": "clip"}, {"rule": "sat"}, {"rule": "spo"}, {"rule": "cispo"}])
@pytest.mark.parametrize("unit", ["sequence", "sequence_token", "product"])
def test_responses_of_one_token_have_one_ratio_in_every_unit(unit, boundary):
    case = random_case((1,) * 40, seed=20)
    assert_same(rule(unit, **boundary), rule(**boundary), case, exact=True)


# ---- statistics -------------------------------------------------------------------------------------------


def test_a_pull_back_outside_the_band_is_not_a_clip():
    out, slope = one_token("grpo", math.log(1.5), -1.0)
    means = pooled(out.sums)
    assert slope == pytest.approx(-1.0)
    assert means["objective/outside_band"] == 1
    assert means["objective/clip_low"] == means["objective/clip_high"] == 0


@pytest.mark.parametrize(
    ("d", "advantage", "expected"),
    [  # q = 0.02: outside the band, clipped low, clipped high, gated, gradient removed by SAT alone
        (+0.05, +1, (1, 0, 1, 1, 1)),
        (+0.05, -1, (1, 0, 0, 1, 0)),
        (+0.05, 0, (1, 0, 0, 1, 0)),
        (-0.05, -1, (1, 1, 0, 1, 1)),
        (+0.30, +1, (1, 0, 1, 1, 0)),  # the plain clip removes it as well
        (-0.30, -1, (1, 1, 0, 1, 0)),
        (+0.03, +1, (0, 0, 0, 1, 0)),
        (+0.01, +1, (0, 0, 0, 0, 0)),
    ],
)
def test_what_is_counted(d, advantage, expected):
    means = pooled(one_token("sat-grpo", d, advantage)[0].sums)
    names = (
        "objective/outside_band",
        "objective/clip_low",
        "objective/clip_high",
        "sat/gate_rate",
        "sat/intervention_rate",
    )
    assert tuple(means[name] for name in names) == expected


def test_statistics_are_detached_float64():
    case = random_case(dtype=torch.float32)
    out = policy_loss(objective("sat-grpo"), **case.arguments(), counts=case.counts, reference_logp=case.reference_logp)
    assert out.loss.dtype == torch.float32
    for value, count in out.sums.values():
        assert value.dtype == count.dtype == torch.float64
        assert not value.requires_grad
    assert set(out.extremes) == {"sat/min_contraction"}
    by_side = {f"{what}_{side}" for what in ("outside", "removed") for side in ("low", "high")}
    by_side_and_sign = {f"objective/{name}_{sign}" for name in by_side for sign in ("positive", "negative")}
    assert set(out.sums) == by_side_and_sign | {
        "objective/surrogate",
        "objective/outside_band",
        "objective/clip_low",
        "objective/clip_high",
        "penalty/kl_ref",
        "sat/radius_low",
        "sat/radius_high",
        "sat/gate_rate",
        "sat/intervention_rate",
        "sat/q",
    }


def test_the_inputs_are_left_alone():
    case = random_case()
    before = {name: value.clone() for name, value in case.arguments().items() if isinstance(value, Tensor)}
    policy_loss(objective("sat-gspo"), **case.arguments(), counts=case.counts, reference_logp=case.reference_logp)
    assert all(torch.equal(before[name], getattr(case, name)) for name in before)


def test_importing_the_loss_stays_light():
    code = "import sys, steadyrl.objective.loss; print(*({'transformers', 'ray', 'vllm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_a_quantile_for_each_lag_gates_each_lag_like_a_batch_of_its_own():
    """The marks of SAT with scope "lag" are those of scope "batch" on the tokens of each lag bucket alone."""
    batch = make_batch((40, 30, 50), seed=4)
    by_lag = objective_of("sat-grpo-lag")
    marks = loss_of(by_lag, batch, batch.counts, threshold_of(by_lag, batch)).marks
    alone = objective_of("sat-grpo")
    expected = torch.zeros_like(batch.loss_mask)
    for low, high in ((0, 0), (1, 1), (2, 3)):
        group = replace(batch, loss_mask=batch.loss_mask & (low <= batch.age) & (batch.age <= high))
        expected |= loss_of(alone, group, group.counts, threshold_of(alone, group)).marks["gated"]
    assert torch.equal(marks["gated"], expected)
    together = loss_of(alone, batch, batch.counts, threshold_of(alone, batch)).marks["gated"]
    assert not torch.equal(marks["gated"], together)
    same_age = replace(batch, age=torch.full_like(batch.age, 5))
    assert torch.equal(loss_of(by_lag, same_age, batch.counts, None).marks["gated"], together)
