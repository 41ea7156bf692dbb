import math

import numpy as np
import pytest
import torch

from steadyrl.diagnostics.split import split, split_derived, split_sums
from steadyrl.types import add_sums, pooled

NAN = float("nan")


def random_batch(dtype, size=400):
    generator = torch.Generator().manual_seed(3)
    behavior = (-20 * torch.rand(size, generator=generator)).to(dtype)
    old = behavior + (torch.randn(size, generator=generator) / 100).to(dtype)
    logp = old + (torch.randn(size, generator=generator) / 10).to(dtype) - 3 * (old - behavior)
    return logp, old, behavior, torch.rand(size, generator=generator) < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_parts_add_up_to_d_per_token(dtype):
    logp, old, behavior, mask = random_batch(dtype)
    policy, engine, used = split(logp, old, behavior, mask)
    total = logp.to(torch.float64) - behavior.to(torch.float64)
    assert used.equal(mask)
    assert policy.dtype == engine.dtype == torch.float64
    assert (policy + engine - total)[mask].abs().max() <= 20 * torch.finfo(torch.float64).eps
    assert not policy[~mask].any()
    assert not engine[~mask].any()


def test_moments_against_numpy():
    logp, old, behavior, mask = random_batch(torch.float64)
    means = pooled(split_sums(logp, old, behavior, mask))
    means |= split_derived(means)
    policy, engine = (logp - old)[mask].numpy(), (old - behavior)[mask].numpy()
    for name, part in (("policy", policy), ("engine", engine), ("total", policy + engine)):
        assert means[f"split/{name}_d_bar"] == pytest.approx(np.abs(part).mean())
        assert means[f"split/{name}"] == pytest.approx(part.mean())
        assert means[f"split/{name}_variance"] == pytest.approx(part.var())
    assert means["split/covariance"] == pytest.approx(np.cov(policy, engine, bias=True)[0, 1])
    assert means["split/covariance"] < 0
    whole = means["split/policy_variance"] + means["split/engine_variance"] + 2 * means["split/covariance"]
    assert means["split/total_variance"] == pytest.approx(whole)


def test_each_part_by_hand():
    logp, old, behavior = (torch.tensor(row, dtype=torch.float64) for row in ([-1.0, -2.0], [-1.5, -2.0], [-1.4, -2.2]))
    means = pooled(split_sums(logp, old, behavior, torch.ones(2, dtype=torch.bool)))
    assert means["split/policy_d_bar"] == pytest.approx(0.25)
    assert means["split/engine_d_bar"] == pytest.approx(0.15)
    assert means["split/engine"] == pytest.approx(0.05)
    assert means["split/total_d_bar"] == pytest.approx(0.3)
    assert means["split/product"] == pytest.approx(-0.05 / 2)


def test_weights_that_have_not_moved_leave_the_engine():
    _, old, behavior, mask = random_batch(torch.float32)
    means = pooled(split_sums(old, old, behavior, mask))
    assert means["split/policy_d_bar"] == means["split/policy_squared"] == 0
    assert means["split/engine_d_bar"] == means["split/total_d_bar"] > 0


@pytest.mark.parametrize("cut", [0, 1, 200, 400])
def test_any_cut_pools_to_the_same(cut):
    columns = random_batch(torch.float32)
    total = {}
    for part in (slice(0, cut), slice(cut, 400)):
        add_sums(total, split_sums(*(column[part] for column in columns)))
    assert pooled(total) == pytest.approx(pooled(split_sums(*columns)))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
def test_garbage(which, garbage):
    columns = [column.clone() for column in random_batch(torch.float64)]
    *_, mask = columns
    expected = pooled(split_sums(*columns))
    columns[which][~mask] = garbage
    assert pooled(split_sums(*columns)) == expected  # masked: no trace
    first = int(mask.nonzero()[0])
    columns[which][first] = garbage
    means = pooled(split_sums(*columns))  # active: set aside, and counted
    assert means["split/not_finite"] == pytest.approx(1 / int(mask.sum()))
    assert all(math.isfinite(value) for value in means.values())


def test_no_active_token():
    logp, old, behavior, mask = random_batch(torch.float32)
    sums = split_sums(logp, old, behavior, torch.zeros_like(mask))
    assert all(value == 0 and count == 0 for value, count in sums.values())
    assert all(math.isnan(value) for value in split_derived(pooled(sums)).values())
