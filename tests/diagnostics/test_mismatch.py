import math

import pytest
import torch

from steadyrl.diagnostics.mismatch import max_abs, mismatch_sums
from steadyrl.types import add_sums, pooled

DELTA = [0.0, 0.3, -0.6, 0.05]
MASK = torch.tensor([True, True, True, True, False])


def batch(garbage=float("nan"), dtype=torch.float64):
    behavior = torch.tensor([-1.0, -2.0, -1.5, -0.5, garbage], dtype=dtype)
    return behavior + torch.tensor([*DELTA, 0.0], dtype=dtype), behavior


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), -1e4])
def test_every_statistic(garbage):
    means = pooled(mismatch_sums(*batch(garbage), MASK))
    assert means == pytest.approx(
        {
            "mismatch/d_bar": 0.95 / 4,
            "mismatch/delta": -0.25 / 4,
            "mismatch/delta_squared": (0.09 + 0.36 + 0.0025) / 4,
            "mismatch/k1": 0.25 / 4,
            "mismatch/k3": sum(math.exp(d) - 1 - d for d in DELTA) / 4,
            "mismatch/tail_0.1": 2 / 4,
            "mismatch/tail_0.5": 1 / 4,
        }
    )
    assert max_abs(*batch(garbage), MASK).item() == pytest.approx(0.6)


def test_tails_are_strict():
    delta = torch.tensor([0.1, 0.5, 0.50001], dtype=torch.float64)
    means = pooled(mismatch_sums(delta, torch.zeros(3), torch.ones(3, dtype=torch.bool)))
    assert means["mismatch/tail_0.1"] == pytest.approx(2 / 3)
    assert means["mismatch/tail_0.5"] == pytest.approx(1 / 3)


def test_small_differences_of_float32_are_not_lost():
    behavior = torch.full((1000,), -8.0)
    logp = torch.nextafter(behavior, torch.zeros(1000))
    means = pooled(mismatch_sums(logp, behavior, torch.ones(1000, dtype=torch.bool)))
    step = 2.0**-21  # spacing of float32 just below 8
    assert means["mismatch/d_bar"] == pytest.approx(step, rel=1e-12)
    assert means["mismatch/k3"] == pytest.approx(step**2 / 2, rel=1e-3)


def test_parts_add_up_to_the_whole():
    logp, behavior = batch()
    whole, total = mismatch_sums(logp, behavior, MASK), {}
    for part in (slice(0, 1), slice(1, 5)):
        add_sums(total, mismatch_sums(logp[part], behavior[part], MASK[part]))
    assert pooled(total) == pytest.approx(pooled(whole))


@pytest.mark.parametrize("size", [0, 5])
def test_no_active_token(size):
    nothing = torch.zeros(size, dtype=torch.bool)
    logp, behavior = (tensor[:size] for tensor in batch())
    assert all(value == 0 and count == 0 for value, count in mismatch_sums(logp, behavior, nothing).values())
    assert max_abs(logp, behavior, nothing).item() == 0


def test_everything_is_detached_float64():
    logp, behavior = batch(0.0, torch.float32)
    sums = mismatch_sums(logp.requires_grad_(), behavior, MASK)
    for value, count in sums.values():
        assert value.dtype == count.dtype == torch.float64
        assert not value.requires_grad
    assert not max_abs(logp, behavior, MASK).requires_grad
