import math
from dataclasses import replace

import pytest
import torch
from objective.batches import AGGREGATIONS, loss_and_gradient, make_batch, objective_of

from steadyrl.axes import DecoupledCorrection, IcepopCorrection, MisCorrection, TisCorrection
from steadyrl.objective.correction import correction_weight
from steadyrl.objective.rule import Layout

LAYOUT = Layout(
    torch.tensor([True, True, False, True, True, True, False]), torch.tensor([0, 0, 0, 1, 1, 2, 3]), num_sequences=4
)
K = torch.tensor([0.4, 3.0, 1.0, 6.0, 0.1, 1.1, 1.0], dtype=torch.float64)  # products 1.2, -, 0.6, 1.1


def weights(correction, k=K, dtype=torch.float64):
    return correction_weight(correction, k.log().to(dtype), LAYOUT)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (TisCorrection(), [0.4, 2.0, 1.0, 2.0, 0.1, 1.1, 1.0]),
        (TisCorrection(cap=5.0, floor=0.5), [0.5, 3.0, 1.0, 5.0, 0.5, 1.1, 1.0]),
        (TisCorrection(level="sequence", cap=1.15), [1.15, 1.15, 1.0, 0.6, 0.6, 1.1, 1.0]),
        (TisCorrection(level="sequence", floor=0.7), [1.2, 1.2, 1.0, 0.7, 0.7, 1.1, 1.0]),
        (IcepopCorrection(), [0.0, 3.0, 1.0, 0.0, 0.0, 1.1, 1.0]),
        (MisCorrection(low=0.7), [1.2, 1.2, 1.0, 0.0, 0.0, 1.1, 1.0]),
        (MisCorrection(high=1.15), [0.0, 0.0, 1.0, 0.6, 0.6, 1.1, 1.0]),
        (DecoupledCorrection(), [0.4, 3.0, 1.0, 6.0, 0.1, 1.1, 1.0]),
        (DecoupledCorrection(cap=2.5), [0.4, 2.5, 1.0, 2.5, 0.1, 1.1, 1.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights(correction, expected, dtype):
    weight = weights(correction, dtype=dtype)
    assert weight.dtype == dtype
    assert weight.tolist() == pytest.approx(expected, rel=1e-6)


def test_bounds_belong_to_the_range():
    one = torch.zeros(7, dtype=torch.float64)
    assert correction_weight(IcepopCorrection(low=1.0, high=1.0), one, LAYOUT).tolist() == [1.0] * 7
    assert correction_weight(MisCorrection(low=1.0, high=1.0), one, LAYOUT).tolist() == [1.0] * 7


def test_a_long_product_is_summed_in_double_precision():
    """4096 log-ratios that cancel but for 1e-3: float32 sums of terms near 1 lose it."""
    log_k = torch.cat([torch.full((2048,), 1.1), torch.full((2048,), -1.1)]).double()
    log_k[0] += 1e-3
    log_k = log_k.float()
    layout = Layout(torch.ones(4096, dtype=torch.bool), torch.zeros(4096, dtype=torch.long), 1)
    weight = correction_weight(TisCorrection(level="sequence"), log_k, layout)[0].item()
    assert weight == pytest.approx(math.exp(math.fsum(log_k.tolist())), rel=1e-6)


def test_it_is_detached():
    log_k = K.log().requires_grad_()
    for correction in (TisCorrection(), IcepopCorrection(), MisCorrection(), DecoupledCorrection()):
        assert not correction_weight(correction, log_k, LAYOUT).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [700.0, -700.0, math.inf, -math.inf])
@pytest.mark.parametrize(
    "correction",
    [TisCorrection(), TisCorrection(level="sequence"), IcepopCorrection(), MisCorrection(), DecoupledCorrection()],
)
def test_no_log_ratio_is_too_large(correction, value, dtype):
    log_k = torch.where(LAYOUT.loss_mask, value, 0.0).to(dtype)
    weight = correction_weight(correction, log_k, LAYOUT)
    assert torch.isfinite(weight).all()
    assert (weight >= 0).all()
    assert weight.max() <= math.exp(20.0) * (1 + 1e-6)


@pytest.mark.parametrize("correction", [IcepopCorrection(), MisCorrection()])
def test_nan_is_outside_every_range(correction):
    assert weights(correction, torch.where(LAYOUT.loss_mask, torch.nan, 1.0)).tolist() == [0, 0, 1, 0, 0, 0, 1]


def test_tokens_outside_the_range_stay_in_the_denominator():
    """Log-ratios 0.1, -1.5, 0.8, -10, 0.3 and the range [0.5, 2]: the sum of the two that are left, over 5."""
    batch = make_batch([5])
    old = torch.full((5,), -11.0, dtype=torch.float64)
    drift = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3], dtype=torch.float64)
    one, everywhere = torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.bool)
    batch = replace(batch, logp=old, old_logp=old, behavior_logp=old - drift, advantage=one, loss_mask=everywhere)
    loss, _ = loss_and_gradient(objective_of("icepop", correction={"high": 2.0}), batch, reference=False)
    assert loss.item() == pytest.approx(-(math.exp(0.1) + math.exp(0.3)) / 5)


# ---- in the loss ------------------------------------------------------------------------------------------


def textbook_weight(correction, log_k):
    """Of one response, from its formula."""
    if correction.kind == "mis" or getattr(correction, "level", "token") == "sequence":
        log_k = [math.fsum(log_k)] * len(log_k)
    k = [math.exp(x) for x in log_k]
    if correction.kind == "tis":
        return [max(min(x, correction.cap), correction.floor) for x in k]
    if correction.kind in ("icepop", "mis"):
        return [x if correction.low <= x <= correction.high else 0.0 for x in k]
    return k


def textbook_loss(objective, batch, logp):
    """PPO's clip times the correction, response by response, for autograd."""
    responses = []
    for b in range(batch.num_sequences):
        active = (batch.sequence == b) & batch.loss_mask
        if not active.any():
            continue
        old, behavior, advantage = batch.old_logp[active], batch.behavior_logp[active], batch.advantage[active]
        if objective.anchor == "prox_approx":
            age = batch.age[active].double()
            share = torch.where(age > 1, 1 - 1 / age, torch.zeros_like(age))
            old = behavior + share * (logp[active].detach() - behavior)
        weight = torch.tensor(textbook_weight(objective.correction, (old - behavior).tolist()), dtype=torch.float64)
        ratio = torch.exp(logp[active] - old)
        clipped = ratio.clamp(1 - objective.boundary.low, 1 + objective.boundary.high)
        responses.append(-weight * torch.min(ratio * advantage, clipped * advantage))
    return aggregated(objective, responses)


def aggregated(objective, responses):
    terms = torch.cat(responses)
    return {
        "token_mean": terms.mean(),
        "sequence_mean": torch.stack([x.mean() for x in responses]).mean(),
        "sequence_sum": torch.stack([x.sum() for x in responses]).mean(),
        "constant": terms.sum() / (8 * len(responses)),
    }[objective.aggregation]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", ["grpo-tis", "grpo-seq-tis", "icepop", "mis", "decoupled-ppo", "a3po"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_is_the_textbook_loss(preset, aggregation, seed):
    objective, batch = objective_of(preset, aggregation), make_batch([9, 4, 1, 15, 7, 8], seed=seed, drift=0.5)
    logp = batch.logp.clone().requires_grad_()
    expected = textbook_loss(objective, batch, logp)
    (slope,) = torch.autograd.grad(expected, logp)
    loss, gradient = loss_and_gradient(objective, batch, reference=False)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, slope)
    assert (gradient == 0).sum() > (~batch.loss_mask).sum(), "nothing was clipped: the case is too tame"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_by_token_on_a_ratio_by_response(aggregation):
    """The ratio of a response is one function of all its tokens, so its gradient carries the mean of their weights."""
    objective, batch = objective_of("gspo-tis", aggregation), make_batch([9, 4, 1, 15, 7, 8], drift=0.3)
    logp = batch.logp.clone().requires_grad_()
    responses = []
    for b in range(batch.num_sequences):
        active = (batch.sequence == b) & batch.loss_mask
        if active.any():
            mismatch = batch.old_logp[active] - batch.behavior_logp[active]
            ratio = (logp[active] - batch.old_logp[active]).mean().exp()
            surrogate = torch.min(ratio * batch.advantage[active], ratio.clamp(0.8, 1.2) * batch.advantage[active])
            responses.append(-mismatch.exp().clamp(max=2.0) * surrogate)
    expected = aggregated(objective, responses)
    (slope,) = torch.autograd.grad(expected, logp)
    loss, gradient = loss_and_gradient(objective, batch, reference=False)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, slope)


def test_a_correction_without_mismatch_changes_nothing():
    batch = make_batch()
    batch = replace(batch, behavior_logp=batch.old_logp)
    plain = objective_of("grpo", anchor="old_actor")
    for preset in ("grpo-tis", "grpo-seq-tis", "icepop", "mis", "decoupled-ppo"):
        for got, expected in zip(
            loss_and_gradient(objective_of(preset), batch), loss_and_gradient(plain, batch), strict=True
        ):
            assert torch.equal(got, expected)


def test_icepop_without_bounds_is_decoupled_ppo():
    batch = make_batch()
    open_range = objective_of("icepop", correction={"low": 0.0, "high": 1e6})
    for got, expected in zip(
        loss_and_gradient(open_range, batch), loss_and_gradient(objective_of("decoupled-ppo"), batch), strict=True
    ):
        assert torch.equal(got, expected)
