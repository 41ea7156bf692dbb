import pytest
import torch

from steadyrl.diagnostics.staleness import lag_extremes, lag_histogram, lag_sums
from steadyrl.types import pooled

VERSIONS = torch.tensor([8, 8, 5, 6, -1, 99])
MASK = torch.tensor([True, True, True, True, False, False])


def test_mean_lag():
    sums = lag_sums(8, VERSIONS, MASK)
    assert pooled(sums) == {"staleness/lag": (0 + 0 + 3 + 2) / 4}
    assert all(part.dtype == torch.float64 for part in sums["staleness/lag"])


def test_histogram_counts_active_tokens():
    histogram = lag_histogram(8, VERSIONS, MASK, 4)
    assert histogram.tolist() == [2, 0, 1, 1, 0]
    assert histogram.dtype == torch.int64


def test_extremes():
    smallest, largest = lag_extremes(9, VERSIONS, MASK)
    assert (smallest.item(), largest.item()) == (1, 4)


@pytest.mark.parametrize(("learner_version", "largest"), [(8, 2), (7, 4)])
def test_a_lag_that_cannot_occur_is_an_internal_error(learner_version, largest):
    with pytest.raises(AssertionError, match="can occur"):
        lag_histogram(learner_version, VERSIONS, MASK, largest)


@pytest.mark.parametrize("size", [0, 6])
def test_no_active_token(size):
    versions, nothing = VERSIONS[:size], torch.zeros(size, dtype=torch.bool)
    assert lag_histogram(8, versions, nothing, 2).tolist() == [0, 0, 0]
    assert all(part == 0 for part in lag_sums(8, versions, nothing)["staleness/lag"])
    smallest, largest = lag_extremes(8, versions, nothing)
    assert min(smallest.item(), 3) == max(largest.item(), 3) == 3  # pooling passes over them
