import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.objective.quantile import order_statistic


def everywhere(values):
    return torch.ones(len(values), dtype=torch.bool)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=60),
    st.integers(1, 99),
)
def test_it_is_the_inverse_of_the_distribution_function(numbers, percent):
    # exact: whole numbers compared as 100 * count >= percent * N
    expected = min(x for x in numbers if 100 * sum(y <= x for y in numbers) >= percent * len(numbers))
    values = torch.tensor(numbers, dtype=torch.float64)
    assert order_statistic(values, everywhere(values), percent / 100).item() == expected


@pytest.mark.parametrize(("alpha", "num", "den"), [(0.9, 9, 10), (0.7, 7, 10), (0.55, 11, 20), (0.07, 7, 100)])
def test_k_is_exact_where_alpha_times_n_is_a_whole_number(alpha, num, den):
    for n in range(den, 40 * den + 1, den):
        values = torch.arange(1, n + 1, dtype=torch.float32)
        assert order_statistic(values, everywhere(values), alpha).item() == num * n // den


def test_masked_values_do_not_count_and_are_not_looked_at():
    values = torch.tensor([5.0, float("nan"), 1.0, float("inf"), 3.0])
    assert order_statistic(values, torch.tensor([True, False, True, False, True]), 0.5).item() == 3.0


@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.9])
def test_one_value_is_every_quantile(alpha):
    assert order_statistic(torch.tensor([0.25]), torch.tensor([True]), alpha).item() == 0.25


@pytest.mark.parametrize("size", [0, 3])
def test_no_active_token_gives_zero(size):
    q = order_statistic(torch.ones(size), torch.zeros(size, dtype=torch.bool), 0.9)
    assert q.shape == ()
    assert q.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_detached_and_keeps_the_dtype(dtype):
    values = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    q = order_statistic(values, everywhere(values), 0.9)
    assert q.dtype == dtype
    assert not q.requires_grad


def test_it_works_above_the_size_limit_of_torch_quantile():
    n = 2**24 + 10
    values = torch.arange(n, dtype=torch.int32).flip(0).double()
    assert order_statistic(values, everywhere(values), 0.5).item() == n // 2 - 1
