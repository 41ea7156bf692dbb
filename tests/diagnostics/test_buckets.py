import math
from dataclasses import dataclass

import pytest
import torch

from steadyrl.diagnostics.buckets import (
    bucket_means,
    bucket_sums,
    by_age,
    by_position,
    by_probability,
    mismatch_by,
)
from steadyrl.diagnostics.mismatch import mismatch_sums
from steadyrl.types import add_sums, pooled

NAN = float("nan")


@dataclass(frozen=True)
class Responses:
    loss_mask: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int


def test_age():
    versions = torch.tensor([8, 7, 5, 5, -1, 99])
    mask = torch.tensor([True, True, True, True, False, False])
    buckets = by_age(8, versions, mask, 4)
    assert buckets.labels == ("0", "1", "2", "3", "4")
    assert buckets.index[mask].tolist() == [0, 1, 3, 3]
    assert ((buckets.index >= 0) & (buckets.index <= 4)).all()


@pytest.mark.parametrize(("learner_version", "largest"), [(8, 2), (7, 4)])
def test_an_age_that_cannot_occur_is_an_internal_error(learner_version, largest):
    with pytest.raises(AssertionError, match="can occur"):
        by_age(learner_version, torch.tensor([8, 5]), torch.ones(2, dtype=torch.bool), largest)


@pytest.mark.parametrize(
    ("longest", "labels"),
    [
        (1, ("0",)),
        (2, ("0", "1")),
        (3, ("0", "1", "2-3")),
        (4, ("0", "1", "2-3")),
        (5, ("0", "1", "2-3", "4-7")),
        (17, ("0", "1", "2-3", "4-7", "8-15", "16-31")),
    ],
)
def test_position_labels(longest, labels):
    mask = torch.ones(longest, dtype=torch.bool)
    buckets = by_position(Responses(mask, torch.zeros(longest, dtype=torch.int64), 1), longest)
    assert buckets.labels == labels
    for position, index in enumerate(buckets.index.tolist()):
        low, *high = (int(end) for end in labels[index].split("-"))
        assert low <= position <= (high or [low])[0]


def test_positions_count_the_active_tokens_of_the_response():
    #        prompt, response 0, a masked token inside, response 1 of length 1, response 2 without any, response 3
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1]).bool()
    sequence = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3])
    buckets = by_position(Responses(mask, sequence, 4), 8)
    assert buckets.index[mask].tolist() == [0, 1, 2, 2, 0, 0, 1]


def test_positions_of_interleaved_responses():
    sequence = torch.tensor([1, 0, 1, 0, 1, 1])
    buckets = by_position(Responses(torch.ones(6, dtype=torch.bool), sequence, 2), 4)
    assert buckets.index.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_response_that_is_too_long_is_an_internal_error():
    layout = Responses(torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 1)
    with pytest.raises(AssertionError, match="more than 3"):
        by_position(layout, 3)


def test_probability_intervals_are_closed_below():
    # 0.5 is exact as the log of a probability in both directions; the others are taken beside their edges
    p = torch.tensor([0.0, 0.0099, 0.0101, 0.0999, 0.1001, 0.5, 0.8999, 0.9001, 0.9899, 0.9901, 1.0])
    buckets = by_probability(p.to(torch.float64).log())
    assert buckets.labels == ("[0, 0.01)", "[0.01, 0.1)", "[0.1, 0.5)", "[0.5, 0.9)", "[0.9, 0.99)", "[0.99, 1]")
    assert buckets.index.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5]
    assert by_probability(torch.tensor([1e-7])).index.tolist() == [5]  # rounded to just above 1


def test_sums_by_hand():
    index = torch.tensor([0, 2, 2, 0, 1])
    buckets = type(by_probability(torch.zeros(1)))(("a", "b", "c", "d"), index)
    x = torch.tensor([1.0, 2.0, 4.0, NAN, NAN], requires_grad=True)
    values = {"x": x, "hit": torch.tensor([True, False, True, True, True])}
    sums = bucket_sums(buckets, values, torch.tensor([True, True, True, False, False]))
    assert [part.tolist() for part in sums["x"]] == [[1, 0, 6, 0], [1, 0, 2, 0]]
    assert not sums["x"][0].requires_grad
    means = bucket_means(sums)
    assert means["x"] == pytest.approx([1, NAN, 3, NAN], nan_ok=True)
    assert means["hit"] == pytest.approx([1, NAN, 0.5, NAN], nan_ok=True)


def random_batch(size=60):
    generator = torch.Generator().manual_seed(1)
    behavior = -3 * torch.rand(size, generator=generator)
    logp = behavior + torch.randn(size, generator=generator) / 5
    mask = torch.rand(size, generator=generator) < 0.7
    versions = torch.randint(3, 9, (size,), generator=generator)
    behavior = torch.where(mask, behavior, NAN)
    return logp, behavior, mask, torch.where(mask, versions, -1)


def test_mismatch_by_age_is_the_mismatch_of_each_age():
    logp, behavior, mask, versions = random_batch()
    removed = logp > -1
    quantile = torch.tensor(0.2)
    means = bucket_means(
        mismatch_by(by_age(8, versions, mask, 6), logp, behavior, mask, quantile=quantile, shares={"removed": removed})
    )
    for age in range(7):
        chosen = mask & (versions == 8 - age)
        expected = pooled(mismatch_sums(logp, behavior, chosen))
        for name in ("d_bar", "delta", "k3", "tv_estimate"):
            assert means[name][age] == pytest.approx(expected[f"mismatch/{name}"], nan_ok=True)
        if not chosen.any():
            assert age == 6
            assert math.isnan(means["gated"][age])
            continue
        assert means["gated"][age] == pytest.approx(((logp - behavior)[chosen].abs() > 0.2).double().mean().item())
        assert means["removed"][age] == pytest.approx(removed[chosen].double().mean().item())


def test_all_buckets_together_are_the_whole():
    logp, behavior, mask, versions = random_batch()
    layout = Responses(mask, torch.arange(60) // 15, 4)
    whole = mismatch_sums(logp, behavior, mask)
    for buckets in (by_age(8, versions, mask, 5), by_position(layout, 15), by_probability(behavior)):
        sums = mismatch_by(buckets, logp, behavior, mask)
        value, count = sums["d_bar"]
        assert value.sum().item() == pytest.approx(whole["mismatch/d_bar"][0].item())
        assert count.sum().item() == whole["mismatch/d_bar"][1].item()
        assert value.shape == count.shape == (len(buckets.labels),)
        assert value.dtype == count.dtype == torch.float64


@pytest.mark.parametrize("cut", [0, 1, 29, 60])
def test_any_cut_pools_to_the_same(cut):
    logp, behavior, mask, versions = random_batch()
    whole = mismatch_by(by_age(8, versions, mask, 5), logp, behavior, mask)
    total = {}
    for part in (slice(0, cut), slice(cut, 60)):
        buckets = by_age(8, versions[part], mask[part], 5)
        add_sums(total, mismatch_by(buckets, logp[part], behavior[part], mask[part]))
    for name, values in bucket_means(whole).items():
        assert bucket_means(total)[name] == pytest.approx(values)


def test_counts_pool_not_means():
    mask = torch.ones(16, dtype=torch.bool)
    hit = torch.tensor([True] * 3 + [False] * 9 + [True] * 3 + [False])
    total = {}
    for part in (slice(0, 12), slice(12, 16)):
        buckets = by_age(0, torch.zeros(16, dtype=torch.int64)[part], mask[part], 0)
        add_sums(total, bucket_sums(buckets, {"hit": hit[part]}, mask[part]))
    assert bucket_means(total) == {"hit": [0.375]}


def test_the_gate_is_strict_and_off_at_0():
    behavior = torch.tensor([-8.0, -1 / 7, -8.0])
    logp = torch.tensor([-8.0, -0.01, -7.7])
    mask = torch.ones(3, dtype=torch.bool)
    buckets = by_age(1, torch.tensor([1, 1, 1]), mask, 0)
    q = (logp - behavior)[1]  # one of the values themselves, in float32, and rounded down there
    assert bucket_means(mismatch_by(buckets, logp, behavior, mask, quantile=q))["gated"] == [pytest.approx(1 / 3)]
    assert bucket_means(mismatch_by(buckets, logp, behavior, mask, quantile=torch.tensor(0.0)))["gated"] == [0]


def test_a_token_that_is_not_finite_is_in_no_bucket():
    logp, behavior = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -math.inf])
    mask = torch.ones(2, dtype=torch.bool)
    value, count = mismatch_by(by_probability(behavior), logp, behavior, mask)["d_bar"]
    assert value.tolist() == [0, 0, 0.5, 0, 0, 0]
    assert count.tolist() == [0, 0, 1, 0, 0, 0]
