import random
import threading
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.objective import quantile
from steadyrl.objective.quantile import order_statistic, order_statistic_across


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


def numbers_of_every_size(n: int, dtype: torch.dtype) -> torch.Tensor:
    """From subnormal to huge, with zeros, ties and infinities."""
    generator = torch.Generator().manual_seed(n)
    largest = {torch.float64: 300.0, torch.float32: 37.0, torch.bfloat16: 37.0, torch.float16: 4.0}[dtype]
    exponent = (torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 1) * largest
    values = (10**exponent).to(dtype)
    values[::7] = values[0]
    values[3::11] = 0.0
    values[5::97] = torch.inf
    return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1 << 20, 100])
@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_every_bit_is_that_of_the_sorted_values(dtype, chunk, alpha, monkeypatch):
    monkeypatch.setattr(quantile, "CHUNK", chunk)
    for n in (1, 2, 99, 1000):
        values = numbers_of_every_size(n, dtype)
        mask = torch.rand(n, generator=torch.Generator().manual_seed(1)) < 0.7
        mask[0] = True
        for chosen in (mask, everywhere(values)):
            kept = values[chosen].sort().values
            k = -(-int(1000 * alpha) * len(kept) // 1000)
            q = order_statistic(values, chosen, alpha)
            assert q.dtype == dtype
            assert torch.equal(q, kept[k - 1])


def test_nan_is_larger_than_every_number():
    values = torch.tensor([torch.nan, 1.0, torch.inf, -torch.nan, 0.0])
    assert order_statistic(values, everywhere(values), 0.6).item() == torch.inf
    assert order_statistic(values, everywhere(values), 0.7).isnan()


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
    for weights in (None, torch.ones(2, requires_grad=True)):
        q = order_statistic(values, everywhere(values), 0.9, weights)
        assert q.dtype == dtype
        assert not q.requires_grad


def test_it_works_above_the_size_limit_of_torch_quantile():
    n = 2**24 + 10
    values = torch.arange(n, dtype=torch.int32).flip(0).double()
    assert order_statistic(values, everywhere(values), 0.5).item() == n // 2 - 1


def test_values_that_are_not_contiguous():
    values = torch.arange(20, dtype=torch.float32).reshape(10, 2)[:, 1]
    assert order_statistic(values, everywhere(values), 0.5).item() == 9.0


# ---- weights ----------------------------------------------------------------------------------------------


def by_response(lengths, alpha: Fraction, rng: random.Random):
    """(values, weights 1 / T_b, the answer from the definition in exact fractions)."""
    rows = [(rng.randrange(12), Fraction(1, length)) for length in lengths for _ in range(length)]
    rng.shuffle(rows)
    threshold = alpha * sum(weight for _, weight in rows)
    expected = min(x for x, _ in rows if sum(weight for y, weight in rows if y <= x) >= threshold)
    values = torch.tensor([float(x) for x, _ in rows])
    return values, torch.tensor([1 / weight.denominator for _, weight in rows], dtype=torch.float64), expected


@pytest.mark.parametrize("percent", [10, 25, 50, 75, 90])
def test_weights_by_response_follow_the_definition(percent):
    rng = random.Random(percent)
    for _ in range(40):
        lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 10))]
        values, weights, expected = by_response(lengths, Fraction(percent, 100), rng)
        assert order_statistic(values, everywhere(values), percent / 100, weights).item() == expected


@pytest.mark.parametrize("length", [1, 3, 7, 11, 49, 333])
def test_a_sum_of_thirds_reaches_what_it_equals(length):
    """9 of 10 responses of one value, each 1 / T_b a token: exactly alpha of the weight, whatever 1 / T_b rounds to."""
    values = torch.arange(10.0).repeat_interleave(length)
    weights = torch.full((10 * length,), 1 / length, dtype=torch.float64)
    assert order_statistic(values, everywhere(values), 0.9, weights).item() == 8.0
    assert order_statistic(values, everywhere(values), 0.91, weights).item() == 9.0


def test_equal_weights_are_no_weights():
    values = numbers_of_every_size(999, torch.float32)
    for alpha in (0.1, 0.5, 0.9):
        plain = order_statistic(values, everywhere(values), alpha)
        assert torch.equal(order_statistic(values, everywhere(values), alpha, torch.full((999,), 0.25)), plain)


def test_a_value_without_weight_is_never_the_answer():
    values = torch.tensor([1.0, 2.0, 3.0])
    assert order_statistic(values, everywhere(values), 0.01, torch.tensor([0.0, 0.0, 1.0])).item() == 3.0


def test_masked_weights_may_hold_anything():
    values, weights = torch.tensor([1.0, 9.0, 2.0]), torch.tensor([0.5, torch.nan, 0.5])
    assert order_statistic(values, torch.tensor([True, False, True]), 0.9, weights).item() == 2.0


# ---- ranks ------------------------------------------------------------------------------------------------


def across(parts, masks, alpha, weights):
    """Every rank's answer; the ranks run as generators of their own, one exchange after the other."""
    world, answers, sizes = len(parts), [None] * len(parts), []
    table, barrier = [None] * world, threading.Barrier(world)

    def work(rank):
        def all_reduce(counts):
            assert counts.dtype == torch.int64
            table[rank] = counts.clone()
            barrier.wait()
            total = torch.stack(table).sum(0)
            barrier.wait()
            if rank == 0:
                sizes.append(counts.numel())
            return total

        answers[rank] = order_statistic_across(
            parts[rank], masks[rank], alpha, all_reduce, None if weights is None else weights[rank]
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return answers, sizes


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [[500, 500], [1000, 0], [0, 1, 999], [0, 0]])
def test_every_rank_has_the_answer_of_all_values_together(cuts, dtype, weighted):
    n = sum(cuts)
    values, weights = numbers_of_every_size(n or 1, dtype)[:n], torch.rand(n)
    mask = torch.rand(n) < 0.8
    alone = order_statistic(values, mask, 0.9, weights if weighted else None)
    split = weights.split(cuts) if weighted else None
    answers, sizes = across(values.split(cuts), mask.split(cuts), 0.9, split)
    assert all(torch.equal(answer, alone) for answer in answers)
    # counts are exchanged, not values: the size does not depend on how many there are
    assert len(sizes) <= (2 if dtype == torch.float32 else 4)
    assert set(sizes) == {2**16 + 1}


def test_a_rank_whose_values_are_all_masked():
    parts, masks = [torch.ones(3), torch.tensor([2.0])], [torch.zeros(3, dtype=torch.bool), torch.tensor([True])]
    answers, _ = across(parts, masks, 0.9, None)
    assert [answer.item() for answer in answers] == [2.0, 2.0]
