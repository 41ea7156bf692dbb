"""What is drawn from, and the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines.brute_force import distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrl.engines.sampling import draw, kept_tokens, tempered


@settings(max_examples=200)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 1.0, 2.25, 9.0]), min_size=2, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.integers(0, 13),
)
def test_what_top_k_and_top_p_leave_is_what_sorting_and_adding_up_by_hand_leaves(logits, temperature, top_p, top_k):
    """With many equal logits: the lower id goes first."""
    z = tempered(torch.tensor([logits]), torch.tensor([temperature]))
    kept = kept_tokens(z, torch.tensor([top_p], dtype=torch.float64), torch.tensor([top_k]))[0]
    expected = distribution(np.array(logits), temperature, top_p, top_k)
    assert kept.tolist() == [probability > 0 for probability in expected]


def test_rows_have_settings_of_their_own():
    z = torch.tensor([[0.0, 1.0, 2.0]] * 4)
    kept = kept_tokens(z, torch.tensor([1.0, 0.5, 1.0, 0.8], dtype=torch.float64), torch.tensor([0, 0, 1, 2]))
    assert kept.tolist() == [[True] * 3, [False, False, True], [False, False, True], [False, True, True]]


def test_a_tail_too_small_to_add_is_kept_without_top_p():
    z = torch.tensor([[0.0, -80.0, -90.0, -100.0]])
    assert kept_tokens(z, torch.tensor([1.0], dtype=torch.float64), torch.tensor([3])).tolist() == [
        [True, True, True, False]
    ]


def test_banned_tokens_are_never_left():
    z = tempered(torch.zeros(1, 4), torch.ones(1), banned=torch.tensor([[True, False, False, True]]))
    assert kept_tokens(z, torch.tensor([1.0], dtype=torch.float64), torch.tensor([3])).tolist() == [
        [False, True, True, False]
    ]


def test_draws_follow_the_distribution():
    logp = torch.log_softmax(torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]), dim=-1).expand(200_000, 4)
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = torch.bincount(draw(logp, noise), minlength=4) / 200_000
    torch.testing.assert_close(shares, logp[0].exp(), atol=5e-3, rtol=0)
    assert shares[2] == 0


@pytest.mark.parametrize(("noise", "token"), [(0.0, 1), (1.0 - 2**-53, 2)])
def test_draws_at_the_edges_stay_inside(noise, token):
    logp = torch.log_softmax(torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]), dim=-1)
    assert draw(logp, torch.tensor([noise], dtype=torch.float64)).tolist() == [token]
