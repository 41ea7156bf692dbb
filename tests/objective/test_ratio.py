import math

import pytest
import torch

from steadyrl.objective.ratio import sequence_log_ratio, token_log_ratio

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
