"""Oracles: published tables, enumeration of everything that could have happened, and simulation."""

import itertools
import math

import numpy as np
import pytest

from steadyrl import statistics
from steadyrl.statistics import mean_interval, paired_difference, rank_table, seeds_needed, t_quantile

# two-sided 95 % and 99 % points of Student's t, from the printed tables
T_TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 9: (2.262, 3.250), 30: (2.042, 2.750)}
T_TABLE |= {120: (1.980, 2.617), 1_000_000: (1.960, 2.576)}


@pytest.mark.parametrize(("degrees", "points"), T_TABLE.items())
def test_t_quantiles_are_those_of_the_tables(degrees, points):
    assert t_quantile(degrees, 0.95) == pytest.approx(points[0], abs=6e-4)
    assert t_quantile(degrees, 0.99) == pytest.approx(points[1], abs=6e-4)


def test_t_quantiles_have_closed_forms_at_one_and_two_degrees():
    for level in (0.5, 0.8, 0.95, 0.999):
        assert t_quantile(1, level) == pytest.approx(math.tan(math.pi * level / 2), rel=1e-9)
        assert t_quantile(2, level) == pytest.approx(level * math.sqrt(2 / (1 - level**2)), rel=1e-9)


def test_a_t_interval_worked_out_by_hand():
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.count, found.level) == (3.0, 5, 0.95)
    half = 2.7764451 * math.sqrt(2.5 / 5)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half), abs=1e-6)


def test_one_value_has_no_interval_and_equal_values_have_one_of_no_width():
    found = mean_interval([0.7])
    assert found.mean == 0.7
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    for method in ("t", "bca"):
        same = mean_interval([0.1, 0.1, 0.1], method=method)
        assert (same.low, same.high) == pytest.approx((0.1, 0.1), abs=1e-15)


def coverage(draw, truth, count, method, trials, seed):
    rng = np.random.default_rng(seed)
    samples = (draw(rng, count) for _ in range(trials))
    found = (mean_interval(sample, method=method, seed=trial) for trial, sample in enumerate(samples))
    return sum(interval.low <= truth <= interval.high for interval in found) / trials


def test_at_five_seeds_student_keeps_its_promise_and_the_bootstrap_does_not(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    normal = (lambda rng, count: rng.normal(3, 2, count)), 3
    assert coverage(*normal, 5, "t", 4000, 0) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 4000))
    assert coverage(*normal, 5, "bca", 1000, 1) == pytest.approx(0.833, abs=0.04)
    bounded = (lambda rng, count: rng.beta(8, 2, count)), 0.8
    assert coverage(*bounded, 5, "t", 2000, 2) == pytest.approx(0.929, abs=0.02)


def test_at_many_skewed_values_the_bootstrap_does(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    right_or_wrong = (lambda rng, count: (rng.random(count) < 0.3).astype(float)), 0.3
    assert coverage(*right_or_wrong, 32, "bca", 1000, 3) == pytest.approx(0.95, abs=0.02)


def bca_by_enumeration(values, level):
    """BCa with every resample there is in place of random ones (Efron & Tibshirani 1993, 14.10 to 14.15)."""
    from statistics import NormalDist

    normal, values = NormalDist(), np.array(values)
    means = np.sort([np.mean(chosen) for chosen in itertools.product(values, repeat=len(values))])
    close = np.isclose(means, values.mean(), rtol=0, atol=1e-12)
    bias = normal.inv_cdf(((means < values.mean()) & ~close).mean() + close.mean() / 2)
    left_out = np.array([np.delete(values, index).mean() for index in range(len(values))])
    gaps = left_out.mean() - left_out
    acceleration = (gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5)
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = bias + normal.inv_cdf(tail)
        ends.append(np.quantile(means, normal.cdf(bias + z / (1 - acceleration * z))))
    return ends


def test_bca_agrees_with_the_enumeration_of_all_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 200_000)
    values = [0.1, 0.25, 0.3, 0.55, 0.9, 2.0]
    found = mean_interval(values, method="bca", level=0.9)
    assert (found.low, found.high) == pytest.approx(bca_by_enumeration(values, 0.9), abs=0.01)
    assert found.high - found.mean > 1.2 * (found.mean - found.low)  # it follows the skew


def test_the_same_seed_gives_the_same_interval_and_another_one_does_not(monkeypatch):
    values = np.random.default_rng(0).random(40)
    first = mean_interval(values, method="bca", seed=1)
    assert first == mean_interval(values, method="bca", seed=1)
    assert first != mean_interval(values, method="bca", seed=2)
    monkeypatch.setattr(statistics, "VALUES_AT_ONCE", 40 * 999)  # in how many pieces it is drawn changes nothing
    assert first == mean_interval(values, method="bca", seed=1)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_the_sign_flip_p_value_is_the_share_of_all_sign_patterns(count):
    rng = np.random.default_rng(count)
    for _ in range(10):
        first, second = rng.integers(0, 6, count) / 10, rng.integers(0, 6, count) / 10
        whole = np.rint(10 * (first - second)).astype(int).tolist()
        sums = [abs(sum(map(int.__mul__, pattern, whole))) for pattern in itertools.product((1, -1), repeat=count)]
        expected = sum(value >= abs(sum(whole)) for value in sums) / 2**count
        assert paired_difference(first, second).p_value == pytest.approx(expected, abs=1e-12)


def test_five_clear_wins_are_not_significant_at_0_05_and_six_are():
    for count, smallest in ((5, 0.0625), (6, 0.03125)):
        found = paired_difference(np.linspace(0.8, 0.9, count), np.linspace(0.1, 0.4, count))
        assert found.p_value == found.smallest_p_value == smallest


def test_many_pairs_are_sampled_and_agree_with_the_normal_limit():
    rng = np.random.default_rng(4)
    second = rng.normal(0, 1, 400)
    first = second + rng.normal(0.09, 1, 400)
    found = paired_difference(first, second)
    differences = first - second
    z = abs(differences.mean()) / math.sqrt((differences**2).mean() / 400)
    assert found.p_value == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.015)
    assert found.p_value == paired_difference(first, second).p_value
    assert paired_difference(second + 1, second).p_value == pytest.approx(1 / 10_001)


def test_sampling_the_sign_flips_comes_to_what_trying_all_does(monkeypatch):
    rng = np.random.default_rng(5)
    first, second = rng.normal(0.4, 1, 12), rng.normal(0, 1, 12)
    exact = paired_difference(first, second).p_value
    monkeypatch.setattr(statistics, "EXACT_SIGN_FLIPS", 0)
    assert 0.05 < exact < 0.9
    assert paired_difference(first, second).p_value == pytest.approx(exact, abs=0.02)


def test_a_paired_difference_is_the_interval_of_the_differences():
    first, second = [0.5, 0.7, 0.6, 0.8], [0.4, 0.5, 0.65, 0.7]
    found = paired_difference(first, second)
    alone = mean_interval([0.1, 0.2, -0.05, 0.1])
    assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high))
    assert found.std == pytest.approx(np.std([0.1, 0.2, -0.05, 0.1], ddof=1))
    back = paired_difference(second, first)
    assert (back.mean, back.low, back.high) == pytest.approx((-found.mean, -found.high, -found.low))
    assert back.p_value == found.p_value


def test_ranks_share_ties_and_are_averaged_over_seeds():
    table = rank_table({"a": [0.9, 0.5, 0.7], "b": [0.8, 0.5, 0.9], "c": [0.1, 0.2, 0.3], "d": [0.0, 0.5, 0.3]})
    # seed by seed: a 1 2 2, b 2 2 1, c 3 4 3.5, d 4 2 3.5
    assert [(row.name, row.mean) for row in table] == [
        ("a", pytest.approx(5 / 3)),
        ("b", pytest.approx(5 / 3)),
        ("d", pytest.approx(9.5 / 3)),
        ("c", pytest.approx(10.5 / 3)),
    ]
    ranks_of_c = mean_interval([3, 4, 3.5])
    assert table[3].low == pytest.approx(ranks_of_c.low)
    assert table[3].high == 4 < ranks_of_c.high  # no rank is worse than the last
    assert table[0].low == 1


def test_ranks_of_random_tables_agree_with_counting():
    rng = np.random.default_rng(6)
    scores = {str(name): rng.integers(0, 4, 6).astype(float) for name in range(5)}
    expected = {}
    for name, mine in scores.items():
        places = [
            [1 + sum(o[s] < mine[s] for o in scores.values()), sum(o[s] <= mine[s] for o in scores.values())]
            for s in range(6)
        ]
        expected[name] = np.mean(places)
    found = {row.name: row.mean for row in rank_table(scores, higher_is_better=False)}
    assert found == pytest.approx(expected)
    upside_down = {row.name: row.mean for row in rank_table(scores)}
    assert upside_down == pytest.approx({name: 6 - rank for name, rank in expected.items()})


# sample sizes of the paired t-test at 95 % that power tables give for a standardized effect
POWER_TABLE = [(0.2, 0.8, 199), (0.5, 0.8, 34), (0.8, 0.8, 15), (1.0, 0.8, 10), (0.5, 0.9, 44), (0.5, 0.95, 54)]


@pytest.mark.parametrize(("effect", "power", "count"), POWER_TABLE)
def test_seeds_needed_are_those_of_the_power_tables(effect, power, count):
    assert seeds_needed(effect, 1.0, power=power) == count
    assert seeds_needed(-effect * 0.03, 0.03, power=power) == count


def test_seeds_needed_are_enough_and_one_less_is_not():
    rng, difference, std = np.random.default_rng(7), 0.02, 0.012
    count = seeds_needed(difference, std)

    def share_seen(count):
        draws = rng.normal(difference, std, (40_000, count))
        half = t_quantile(count - 1, 0.95) * draws.std(axis=1, ddof=1) / math.sqrt(count)
        return float((abs(draws.mean(axis=1)) > half).mean())

    assert share_seen(count) > 0.8 > share_seen(count - 1)


def test_seeds_needed_at_the_ends():
    assert seeds_needed(1.0, 0.0) == 2
    assert seeds_needed(1e6, 1.0) == 2
    assert seeds_needed(0.001, 1.0) == pytest.approx((1.959964 + 0.841621) ** 2 * 1e6, rel=1e-4)


def test_calls_that_make_no_sense_are_stopped():
    for wrong in ([], [math.nan], [[1.0]]):
        with pytest.raises(AssertionError):
            mean_interval(wrong)
    with pytest.raises(AssertionError, match="partner"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(AssertionError):
        seeds_needed(0.0, 1.0)
