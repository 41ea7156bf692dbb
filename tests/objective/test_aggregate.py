import pytest
import torch

from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.types import BatchCounts

MASK = torch.tensor([True, False, True, True, True, False])
SEQUENCE = torch.tensor([0, 0, 1, 1, 1, 2])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 40, 0, 1 / 40, 1 / 40, 1 / 40, 0]),
        ("sequence_mean", [1 / 5, 0, 1 / 15, 1 / 15, 1 / 15, 0]),
    ],
)
def test_weights_come_from_the_counts_of_the_whole_batch(aggregation, expected):
    weight = aggregation_weight(aggregation, MASK, SEQUENCE, 3, BatchCounts(num_tokens=40, num_sequences=5))
    assert weight.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_of_a_whole_batch_add_up_to_one(aggregation):
    weight = aggregation_weight(aggregation, MASK, SEQUENCE, 3, BatchCounts(num_tokens=4, num_sequences=2))
    assert weight.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_nothing_active_gives_zeros(aggregation):
    mask = torch.zeros(6, dtype=torch.bool)
    weight = aggregation_weight(aggregation, mask, SEQUENCE, 3, BatchCounts(num_tokens=0, num_sequences=0))
    assert torch.equal(weight, torch.zeros(6, dtype=torch.float64))
