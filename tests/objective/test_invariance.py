"""Every preset with every aggregation: the loss is a property of the batch, not of how it is laid out."""

from dataclasses import replace

import pytest
import torch
from objective.batches import AGGREGATIONS, loss_and_gradient, make_batch, objective_of

from steadyrl.presets import PRESETS

EXACT = {"rtol": 1e-11, "atol": 1e-13}
# rules that look at the micro-batch: what they answer depends on the cut, and that is documented
BY_MICROBATCH = {"sat-grpo-microbatch"}
CUTS = [
    [[0], [1], [2], [3], [4], [5], [6]],
    [[0, 1, 2, 3, 4, 5], [6]],
    [[], [5, 0, 3], [4], [], [6, 2, 1]],  # empty ones, one that is masked as a whole, and another order
]


def same(left, right) -> bool:
    return all(torch.allclose(a, b, **EXACT) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in BY_MICROBATCH])
def test_any_cut_gives_the_loss_and_the_gradient_of_the_whole(preset, aggregation):
    objective, batch = objective_of(preset, aggregation, kl_coef=0.1), make_batch()
    loss, gradient = loss_and_gradient(objective, batch)
    for cut in CUTS:
        cut_loss, cut_gradient = loss_and_gradient(objective, batch, cut)
        torch.testing.assert_close(cut_loss, loss, **EXACT)
        torch.testing.assert_close(cut_gradient, gradient, **EXACT)


def test_the_exceptions_are_exceptions():
    """The rules that see only their micro-batch do depend on the cut: exactly those two."""
    batch, dependent = make_batch([7, 5, 12, 4, 9, 8], seed=3, drift=0.4), set()
    for preset in PRESETS:
        objective = objective_of(preset)
        if not same(loss_and_gradient(objective, batch), loss_and_gradient(objective, batch, [[0, 1], [2, 3, 4, 5]])):
            dependent.add(preset)
    assert dependent == BY_MICROBATCH


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_padding_changes_nothing(preset, aggregation):
    objective, batch = objective_of(preset, aggregation, kl_coef=0.1), make_batch()
    loss, gradient = loss_and_gradient(objective, batch)
    for fill in (0.0, float("nan")):
        rows = batch.padded(fill)
        padded_loss, padded_gradient = loss_and_gradient(objective, rows)
        torch.testing.assert_close(padded_loss, loss, **EXACT)
        assert padded_gradient[~rows.loss_mask].abs().sum() == 0
        torch.testing.assert_close(padded_gradient[rows.loss_mask], gradient[batch.loss_mask], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preset", PRESETS)
def test_masked_tokens_have_no_influence_whatever_they_hold(preset, dtype):
    objective, batch = objective_of(preset, kl_coef=0.1), make_batch(dtype=dtype)
    loss, gradient = loss_and_gradient(objective, batch.filled(0.0, 0))
    assert torch.isfinite(loss)
    assert gradient.abs().sum() > 0
    assert gradient[~batch.loss_mask].abs().sum() == 0
    for fill in (float("nan"), float("inf"), -float("inf"), -1e4):
        other_loss, other_gradient = loss_and_gradient(objective, batch.filled(fill, -7))
        assert torch.equal(other_loss, loss)
        assert torch.equal(other_gradient, gradient)


@pytest.mark.parametrize("field", ["logp", "behavior_logp", "old_logp", "reference_logp", "advantage", "divergence"])
@pytest.mark.parametrize("preset", ["sat-gspo-response", "vespo", "decoupled-ppo", "a3po", "mis", "trm", "mu-grpo"])
def test_one_poisoned_input_at_a_time(preset, field):
    """With everything poisoned, an error in one place could hide behind another's."""
    objective, batch = objective_of(preset, kl_coef=0.1), make_batch()
    expected = loss_and_gradient(objective, batch)
    values = torch.where(batch.loss_mask, getattr(batch, field), float("-inf"))
    poisoned = replace(batch, **{field: values})
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradient(objective, poisoned), expected, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_response_without_active_tokens_does_not_count(preset):
    objective, batch = objective_of(preset), make_batch()
    everything, active = list(range(7)), [0, 1, 2, 3, 5, 6]
    assert not batch.take([4]).loss_mask.any()
    loss, _ = loss_and_gradient(objective, batch.take(everything))
    torch.testing.assert_close(loss_and_gradient(objective, batch.take(active))[0], loss, **EXACT)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_lengths_one_and_three_with_opposite_advantages(aggregation):
    """Ratio 1: the mean over tokens is (3 - 1) / 4, that over responses is 0, the other two are sums."""
    batch = make_batch([1, 3])
    batch = replace(
        batch,
        logp=batch.behavior_logp,
        advantage=torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        loss_mask=torch.ones(4, dtype=torch.bool),
    )
    expected = {"token_mean": 0.5, "sequence_mean": 0.0, "sequence_sum": 1.0, "constant": 2 / 16}[aggregation]
    objective = objective_of("grpo", aggregation)
    for cut in (None, [[0], [1]]):
        loss, _ = loss_and_gradient(objective, batch, cut, reference=False)
        assert loss.item() == pytest.approx(expected, abs=1e-12)
