import pytest
import torch
from objective.batches import AGGREGATIONS, objective_of

from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts

MASK = torch.tensor([True, False, True, True, True, False])
LAYOUT = Layout(MASK, torch.tensor([0, 0, 1, 1, 1, 2]), 3)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 40, 0, 1 / 40, 1 / 40, 1 / 40, 0]),
        ("sequence_mean", [1 / 5, 0, 1 / 15, 1 / 15, 1 / 15, 0]),
        ("sequence_sum", [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 0]),
        ("constant", [1 / 40, 0, 1 / 40, 1 / 40, 1 / 40, 0]),  # 5 responses x 8 tokens
    ],
)
def test_weights_come_from_the_counts_of_the_whole_batch(aggregation, expected):
    counts = BatchCounts(num_tokens=40, num_sequences=5)
    weight = aggregation_weight(objective_of("grpo", aggregation), LAYOUT, counts)
    assert weight.dtype == torch.float64
    assert weight.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("aggregation", "total"), [("token_mean", 1), ("sequence_mean", 1), ("sequence_sum", 2)])
def test_what_the_weights_of_a_whole_batch_add_up_to(aggregation, total):
    weight = aggregation_weight(objective_of("grpo", aggregation), LAYOUT, BatchCounts(4, 2))
    assert weight.sum().item() == pytest.approx(total)


def test_the_constant_does_not_look_at_lengths():
    weight = [
        aggregation_weight(
            objective_of("grpo", aggregation="constant", aggregation_tokens=tokens), LAYOUT, BatchCounts(999, 2)
        )
        for tokens in (10, 1000)
    ]
    assert weight[0][MASK].tolist() == pytest.approx([1 / 20] * 4)
    torch.testing.assert_close(weight[0], 100 * weight[1])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_active_gives_zeros(aggregation):
    layout = Layout(torch.zeros(6, dtype=torch.bool), LAYOUT.sequence, 3)
    weight = aggregation_weight(objective_of("grpo", aggregation), layout, BatchCounts(0, 0))
    assert torch.equal(weight, torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_micro_batch_without_tokens(aggregation):
    layout = Layout(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.long), 0)
    assert aggregation_weight(objective_of("grpo", aggregation), layout, BatchCounts(7, 2)).shape == (0,)
