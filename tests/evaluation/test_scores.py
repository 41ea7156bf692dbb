"""Scores and their errors against enumeration of every draw, and against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from steadyrl.evaluation.scores import Votes, avg_at_k, maj_at_k, majority, mean_and_se, pass_at, pass_at_k


def votes(*rights: int, k: int = 4) -> list[Votes]:
    return [Votes(right, (k - right,) if right < k else (), k) for right in rights]


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_what_enumeration_says(n: int):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int):
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        pass_at_k(n, c, k)


def test_pass_at_j_is_unbiased():
    """Over all outcomes of k samples with a true share p, the estimate averages to 1 - (1 - p)^j."""
    k, p = 5, Fraction(1, 3)
    for j in range(1, k + 1):
        mean = sum(
            math.comb(k, c) * float(p**c * (1 - p) ** (k - c)) * pass_at(j, votes(c, k=k)).value for c in range(k + 1)
        )
        assert mean == pytest.approx(1 - float(1 - p) ** j, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        ("yyn", 1.0),
        ("ynn", 0.0),
        ("ynm", 1 / 3),
        ("yynn", 1 / 2),
        ("nm", 0.0),
        ("y--", 1.0),
        ("---", 0.0),
        ("nn-", 0.0),
        ("y", 1.0),
    ],
)
def test_the_majority(answers: str, value: float):
    """y is right, n and m are wrong, - is no answer."""
    counted = Votes.count([(letter == "y", None if letter == "-" else letter) for letter in answers])
    assert majority(counted.right, counted.wrong) == pytest.approx(value)
    assert maj_at_k([counted]).value == pytest.approx(value)


def test_right_answers_are_one_class_however_they_are_spelled():
    counted = Votes.count([(True, "1/2"), (True, "0.5"), (False, "3"), (False, "4"), (False, "4")])
    assert counted == Votes(2, (1, 2), 5)
    assert majority(counted.right, counted.wrong) == 0.5


def test_errors_over_problems_are_those_of_independent_values():
    # shares 1, 1/4, 0: mean 5/12, sum of squared deviations 49/144 + 4/144 + 25/144 = 13/24
    score = avg_at_k(votes(4, 1, 0))
    assert score.value == pytest.approx(5 / 12, abs=1e-12)
    assert score.se == pytest.approx(math.sqrt(13 / 24 / 2 / 3), abs=1e-12)
    assert mean_and_se([0.25, 0.25]) == (0.25, 0.0)
    assert mean_and_se([0.25]) == (0.25, None)


def test_the_error_of_avg_over_samples_is_the_sample_variance_of_its_answers():
    rights = (4, 1, 0, 2)
    answers = [[1.0] * right + [0.0] * (4 - right) for right in rights]
    expected = math.sqrt(sum(np.var(row, ddof=1) / 4 for row in answers)) / len(rights)
    assert avg_at_k(votes(*rights)).se_samples == pytest.approx(expected, abs=1e-12)


def test_errors_over_samples_against_every_redraw_of_the_answers():
    """All 4^4 ways to draw 4 answers again from the 4 seen ones, the second oracle beside the formulas."""
    seen = ["y", "y", "n", "-"]
    redraws = list(itertools.product(seen, repeat=4))
    counted = Votes.count([(letter == "y", None if letter == "-" else letter) for letter in seen])
    values = [pass_at_k(4, row.count("y"), 3) for row in redraws]
    assert pass_at(3, [counted]).se_samples == pytest.approx(math.sqrt(np.var(values) * 4 / 3), abs=1e-12)
    values = [majority(row.count("y"), [row.count("n")]) for row in redraws]
    # 2000 draws: a standard deviation is known to about 1 / sqrt(4000), 1.6 %
    assert maj_at_k([counted]).se_samples == pytest.approx(math.sqrt(np.var(values) * 4 / 3), rel=0.06)


def test_a_redraw_without_any_answer_is_not_right():
    """One right answer and one without an answer: 3 of the 4 redraws of two are right."""
    score = maj_at_k([Votes(1, (), 2)])
    assert score.se_samples == pytest.approx(math.sqrt(3 / 16 * 2), rel=0.06)


def test_unanimous_answers_leave_no_error_over_samples():
    sure = [Votes(4, (), 4), Votes(0, (4,), 4), Votes(0, (), 4)]
    assert avg_at_k(sure).se_samples == pass_at(4, sure).se_samples == maj_at_k(sure).se_samples == 0.0


def test_one_sample_says_nothing_about_others():
    single = [Votes(1, (), 1), Votes(0, (1,), 1)]
    assert avg_at_k(single).se_samples is None
    assert maj_at_k(single).se_samples is None
    assert avg_at_k(single).se == pytest.approx(0.5)


def test_the_draws_are_repeatable():
    mixed = [Votes(2, (1, 1), 5), Votes(3, (2,), 5)]
    assert maj_at_k(mixed, seed=3) == maj_at_k(mixed, seed=3)
    assert maj_at_k(mixed, seed=3).se_samples != maj_at_k(mixed, seed=4).se_samples
