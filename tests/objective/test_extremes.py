"""Numbers at the edge, for every preset.

A log-ratio of +-700 on an active token gives a finite loss and a finite gradient. An active log-probability that
is infinite or NaN is an engine's or a model's fault: nothing crashes and nothing hangs, but the loss may be
non-finite, which the learner reports with the name of the rollout. On masked tokens it has no influence.
"""

import math
from dataclasses import replace

import pytest
import torch
from objective.batches import AGGREGATIONS, loss_and_gradient, loss_of, make_batch, objective_of, threshold_of

from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.objective.ratio import unit_slope
from steadyrl.presets import PRESETS
from steadyrl.types import BatchCounts

DTYPES = [torch.float32, torch.float64]


def on_policy(batch):
    """All policies the same: every ratio is exactly 1."""
    return replace(
        batch,
        logp=batch.behavior_logp,
        old_logp=batch.behavior_logp,
        divergence=torch.zeros_like(batch.divergence),
        loss_mask=torch.ones_like(batch.loss_mask),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("field", ["logp", "behavior_logp", "old_logp"])
def test_log_ratios_of_700(preset, field, dtype):
    """Log-probabilities of -700 in the policy (ratio e^-700) or in an anchor (e^700), in some tokens of a response
    and in all of one, with both signs of the advantage."""
    batch = make_batch(dtype=dtype)
    place = batch.loss_mask.nonzero()[:, 0]
    values = getattr(batch, field).clone()
    values[place[::4]] = -700.0
    values[batch.sequence == 3] = -700.0
    for sign in (1, -1):
        shifted = replace(batch, **{field: values}, advantage=sign * batch.advantage)
        loss, gradient = loss_and_gradient(objective_of(preset), shifted, reference=False)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("field", ["logp", "behavior_logp", "old_logp", "reference_logp"])
@pytest.mark.parametrize("preset", PRESETS)
def test_an_active_number_that_is_not_finite_breaks_nothing_but_the_loss(preset, field):
    batch, objective = make_batch(), objective_of(preset)
    for value in (math.inf, -math.inf, math.nan):
        values = getattr(batch, field).clone()
        values[batch.loss_mask.nonzero()[3, 0]] = value
        loss, gradient = loss_and_gradient(objective, replace(batch, **{field: values}))
        assert loss.shape == ()
        assert gradient.shape == batch.logp.shape
        assert (gradient[~batch.loss_mask] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_at_ratio_one_every_preset_is_the_policy_gradient(preset, aggregation):
    """The gradient is -weight A, whatever the boundary: nothing is removed, weighted or rejected at lag 0."""
    batch, objective = on_policy(make_batch()), objective_of(preset, aggregation)
    loss, gradient = loss_and_gradient(objective, batch, reference=False)
    weight = aggregation_weight(objective, batch.layout, batch.counts)
    if objective.boundary.rule != "vespo":  # a weight on logp, which does not have the slope of the product
        weight = weight * unit_slope(objective.unit, batch.layout)
    assert torch.isfinite(loss)
    torch.testing.assert_close(gradient, -weight * batch.advantage)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_one_token(preset, dtype):
    batch = make_batch([1], dtype=dtype)
    for behavior in (batch.logp, batch.logp - 0.05, batch.logp + 0.05):
        one = replace(batch, behavior_logp=behavior, old_logp=behavior)
        loss, gradient = loss_and_gradient(objective_of(preset), one)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_no_token(preset, dtype):
    """Masked tokens only, or no tokens: the loss is 0 and can be differentiated, and no statistic is NaN."""
    batch, objective = make_batch(dtype=dtype), objective_of(preset)
    masked = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)).filled(math.nan, 0)
    for empty in (masked, batch.take([])):
        for counts in (BatchCounts(0, 0), batch.counts):
            leaf = replace(empty, logp=empty.logp.clone().requires_grad_())
            out = loss_of(objective, leaf, counts, threshold_of(objective, leaf))
            (gradient,) = torch.autograd.grad(out.loss, leaf.logp)
            assert out.loss.item() == 0
            assert (gradient == 0).all()
            assert all(math.isfinite(total) and count == 0 for total, count in out.sums.values())
            assert all(torch.isfinite(value) for value in out.extremes.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_no_advantage_no_gradient(preset):
    """A group of equal rewards: nothing is left but the penalties."""
    batch = make_batch()
    batch = replace(batch, advantage=torch.zeros_like(batch.advantage))
    loss, gradient = loss_and_gradient(objective_of(preset, log_ratio_coef=0.0), batch, reference=False)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_statistics_of_an_ordinary_batch_are_finite(preset):
    batch, objective = make_batch(), objective_of(preset)
    out = loss_of(objective, batch, batch.counts, threshold_of(objective, batch))
    for total, count in out.sums.values():
        assert math.isfinite(total)
        assert count == batch.counts.num_tokens


def test_a_masked_token_with_a_ratio_that_overflows():
    """Trainer -1, engine -100 on a masked token: e^99 overflows float32, and must reach neither loss nor gradient."""
    batch = make_batch(dtype=torch.float32)
    place = (~batch.loss_mask).nonzero()[0, 0]
    behavior, logp, reference = batch.behavior_logp.clone(), batch.logp.clone(), batch.reference_logp.clone()
    behavior[place], logp[place], reference[place] = -100.0, -1.0, 100.0
    stale = replace(batch, behavior_logp=behavior, logp=logp, reference_logp=reference)
    for preset in PRESETS:
        loss, gradient = loss_and_gradient(objective_of(preset), stale)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
