import math
import random

import pytest

from steadyrl.diagnostics.collapse import collapse_step

RISE = [0.09, 0.15, 0.20, 0.25, 0.28, 0.30, 0.31, 0.33, 0.34, 0.34]


def marked(scores, **options):
    return collapse_step([5 * (i + 1) for i in range(len(scores))], scores, **options)


def test_late_collapse():
    assert marked([*RISE, 0.33, 0.20, 0.14, 0.14, 0.13]) == 60  # 0.20 is the first below 0.7 * 0.34 = 0.238


def test_slow_fall_is_marked_where_it_passes_the_share():
    fall = [0.32, 0.30, 0.28, 0.26, 0.245, 0.23, 0.21, 0.20, 0.19]
    assert marked([*RISE, *fall]) == 5 * (len(RISE) + 6)


def test_the_share_is_that_of_the_best_not_of_the_end():
    fall = [0.33, 0.25, 0.25, 0.25]
    assert marked([*RISE, *fall]) is None
    assert marked([*RISE, *fall], drop=0.2) == 60


def test_dip_and_recovery():
    dip = [0.2, 0.14, 0.14, 0.14, 0.15]
    assert marked([*RISE, *dip, 0.3, 0.33, 0.34]) is None
    assert marked([*RISE, *dip, 0.3, 0.33, 0.33, 0.1, 0.1, 0.1]) == 5 * (
        len(RISE) + 9
    )  # the second fall, not the first


def test_recovery_to_the_share_is_enough():
    assert marked([*RISE, 0.14, 0.14, 0.14, 0.25, 0.25, 0.25]) is None


@pytest.mark.parametrize(
    "scores",
    [
        RISE,
        [0.3] * 20,
        [0.0] * 20,
        [i / 100 for i in range(50)],
        [1 - math.exp(-i / 10) for i in range(50)],
    ],
)
def test_curves_that_never_fall(scores):
    assert marked(scores) is None


def test_a_single_outlier_is_neither_the_best_nor_a_fall():
    assert marked([*[0.2] * 8, 0.9, *[0.2] * 8]) is None
    assert marked([*[0.3] * 10, 0.0]) is None
    assert marked([*[0.3] * 10, 0.0, *[0.3] * 3]) is None


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_flat_noise_is_rarely_marked(spread):
    def flat(seed):
        draw = random.Random(seed)
        return [0.3 * (1 + spread * draw.gauss(0, 1)) for _ in range(60)]

    assert sum(marked(flat(seed)) is not None for seed in range(300)) <= 9


def test_collapse_under_noise_is_found_near_its_step():
    for seed in range(50):
        draw = random.Random(seed)
        scores = [(0.34 if i < 40 else 0.14) + draw.gauss(0, 0.02) for i in range(60)]
        assert abs(marked(scores) - 5 * 41) <= 5


def test_too_short_to_judge():
    assert marked([]) is None
    assert marked([0.3]) is None
    assert marked([0.3, 0.0]) is None
    assert marked([*RISE, 0.33, 0.1, 0.1]) is None  # two points below, three are needed
    assert marked([*RISE, 0.33, 0.1, 0.1], patience=2) == 60
    assert marked([*RISE, 0.33, 0.1, 0.1, 0.1]) == 60


def test_missing_scores_are_left_out():
    nan = float("nan")
    assert marked([*RISE, nan, 0.33, 0.1, nan, 0.1, 0.1, nan]) == 65
    assert marked([nan] * 9) is None


def test_the_floor_is_what_a_fall_is_measured_from():
    scores = [0.6, 0.7, 0.8, 0.8, 0.8, 0.62, 0.61, 0.6, 0.6]  # all that was learned is lost, and 25 % of the score
    assert marked(scores) is None
    assert marked(scores, floor=0.6) == 30
    below_zero = [-1.0, -0.8, -0.5, -0.5, -0.5, -1.0, -1.0, -1.0]
    assert marked(below_zero) is None  # nothing above the floor to lose
    assert marked(below_zero, floor=-1.0) == 30


def test_a_fall_from_the_first_point_on():
    assert marked([0.3, 0.3, 0.25, 0.18, 0.12, 0.08, 0.05, 0.02]) == 20


@pytest.mark.parametrize("options", [{"drop": 0.0}, {"drop": 1.5}, {"patience": 0}, {"window": 2}, {"window": 0}])
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="drop must be"):
        marked(RISE, **options)


def test_one_score_per_step():
    with pytest.raises(ValueError, match="zip"):
        collapse_step([1, 2], [0.1])
