import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.objective.penalty import kl_k3


def test_value_and_gradient():
    logp = torch.tensor([-1.0, -2.0, -0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.2, -0.7], dtype=torch.float64)
    k3 = kl_k3(logp, reference, torch.ones(3, dtype=torch.bool))
    x = [-0.5, 0.8, 0.0]
    assert k3.tolist() == pytest.approx([math.exp(v) - 1 - v for v in x])
    k3.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1 - math.exp(v) for v in x])


@given(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32))
def test_it_is_never_negative(logp, reference):
    assert kl_k3(torch.tensor([logp]), torch.tensor([reference]), torch.tensor([True])).item() >= 0


def test_it_is_never_negative_for_the_smallest_differences():
    logp = -torch.rand(20000, generator=torch.Generator().manual_seed(0))
    nudge = 1e-4 * torch.randn(20000, generator=torch.Generator().manual_seed(1))
    assert (kl_k3(logp, logp + nudge, torch.ones(20000, dtype=torch.bool)) >= 0).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), -1e4])
def test_masked_tokens_are_zero_in_value_and_gradient(garbage):
    logp = torch.tensor([-1.0, garbage], requires_grad=True)
    k3 = kl_k3(logp, torch.tensor([-2.0, garbage]), torch.tensor([True, False]))
    k3.sum().backward()
    assert k3[1] == 0
    assert logp.grad[1] == 0
    assert torch.isfinite(logp.grad).all()
