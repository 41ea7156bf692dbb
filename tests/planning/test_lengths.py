"""Drawn lengths against the distributions that they are said to come from."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrl.planning.lengths import GroupLengths, RecordedLengths, StatedLengths, mean_lengths


def many(lengths, limit=10**9):
    rng = np.random.default_rng(1)
    return np.concatenate([lengths.draw(rng, 8, limit).responses for _ in range(4000)])


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_lognormal_lengths_have_the_stated_mean_and_spread(spread):
    drawn = many(StatedLengths(shape="lognormal", mean=400, spread=spread))
    assert drawn.mean() == pytest.approx(400, rel=0.03)
    assert drawn.std() / drawn.mean() == pytest.approx(spread, rel=0.06)


def test_geometric_lengths_have_the_stated_mean_and_no_memory():
    drawn = many(StatedLengths(shape="geometric", mean=50))
    assert drawn.mean() == pytest.approx(50, rel=0.03)
    assert drawn.std() == pytest.approx(np.sqrt(1 - 1 / 50) * 50, rel=0.04)
    assert (drawn > 60).mean() == pytest.approx((1 - 1 / 50) ** 60, rel=0.05)


def test_no_length_is_beyond_the_limit_or_below_one():
    drawn = many(StatedLengths(shape="lognormal", mean=20, spread=3.0), limit=64)
    assert (drawn.min(), drawn.max()) == (1, 64)


def test_recorded_groups_stay_together():
    recorded = RecordedLengths((GroupLengths(3, np.array([1, 2])), GroupLengths(4, np.array([30, 40]))))
    rng = np.random.default_rng(0)
    drawn = {(group.prompt, *group.responses.tolist()) for group in (recorded.draw(rng, 2, 35) for _ in range(100))}
    assert drawn == {(3, 1, 2), (4, 30, 35)}


def test_another_number_of_responses_is_drawn_from_the_same_group():
    recorded = RecordedLengths((GroupLengths(3, np.array([1, 2])), GroupLengths(4, np.array([30, 40]))))
    rng = np.random.default_rng(0)
    for _ in range(50):
        group = recorded.draw(rng, 5, 100)
        assert set(group.responses.tolist()) <= ({1, 2} if group.prompt == 3 else {30, 40})
        assert len(group.responses) == 5


def test_the_context_of_a_sampled_token_counts_long_responses_by_their_tokens():
    groups = (GroupLengths(10, np.array([1, 3])),)
    # token by token: the response of 1 has 10 before it; that of 3 has 10, 11, 12
    means = mean_lengths(RecordedLengths(groups), 2, 100)
    assert (means.prompt, means.response) == (10, 2)
    assert means.context == pytest.approx((10 + 10 + 11 + 12) / 4)
