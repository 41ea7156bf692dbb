import math
from dataclasses import replace

import pytest
import torch
from objective.batches import loss_and_gradient, loss_of, make_batch, objective_of

from steadyrl.axes import (
    GeometricRejection,
    K3Rejection,
    NegativeVetoRejection,
    OffPolicyRejection,
    TrustRegionRejection,
)
from steadyrl.objective.rejection import kept_tokens
from steadyrl.objective.rule import Layout

EVERY = [
    GeometricRejection(),
    GeometricRejection(of="mismatch"),
    K3Rejection(),
    K3Rejection(of="policy"),
    OffPolicyRejection(),
    TrustRegionRejection(),
    NegativeVetoRejection(),
]


def kept(rejection, responses, advantages=None, masked=()):
    """The answer for responses given as lists of log-ratios, one list of booleans each."""
    advantages = advantages or [1.0] * len(responses)
    d = torch.tensor([x for response in responses for x in response], dtype=torch.float64)
    sequence = torch.tensor([b for b, response in enumerate(responses) for _ in response])
    mask = torch.tensor([i not in masked for i in range(len(d))])
    d = torch.where(mask, d, 0.0)
    of_mismatch = getattr(rejection, "of", "policy") == "mismatch"
    unused = torch.full_like(d, 1e3)
    layout = Layout(mask, sequence, len(responses))
    policy, mismatch = (unused, d) if of_mismatch else (d, unused)
    answer = kept_tokens(rejection, policy, mismatch, torch.tensor(advantages)[sequence], layout).tolist()
    return [[answer.pop(0) for _ in response] for response in responses]


@pytest.mark.parametrize("of", ["policy", "mismatch"])
def test_geometric_keeps_the_mean_ratio_in_a_band_whatever_the_advantage(of):
    responses = [[0.3, -0.3], [0.004, 0.004], [0.006, 0.006], [-0.006, -0.004, -0.0062], [0.0]]
    answer = kept(GeometricRejection(of=of, low=0.995, high=1.005), responses, [1.0, -1.0, -1.0, 1.0, 0.0])
    assert answer == [[True] * 2, [True] * 2, [False] * 2, [False] * 3, [True]]


@pytest.mark.parametrize("of", ["policy", "mismatch"])
def test_k3_limits_the_mean(of):
    responses = [[0.2, 0.0], [0.2, 0.0, 0.0], [-0.25]]
    means = [sum(math.exp(x) - 1 - x for x in r) / len(r) for r in responses]
    assert sorted(means) == [means[1], means[0], means[2]]
    assert kept(K3Rejection(of=of, limit=means[0] + 1e-12), responses) == [[True] * 2, [True] * 3, [False]]


def test_off_policy_drops_negative_responses_that_the_policy_has_left():
    responses = [[-0.3, 0.0], [-0.3, 0.0], [0.3, 0.3], [-0.3, 0.0]]
    answer = kept(OffPolicyRejection(delta=0.1), responses, [-1.0, 1.0, -1.0, 0.0])
    assert answer == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]


def test_trust_region_has_a_limit_for_the_worst_token_and_one_for_the_mean():
    responses = [[1.1, 0.0, 0.0, 0.0], [-1.1, 0.0, 0.0], [0.5, 0.5], [0.1, 0.0]]
    worst = TrustRegionRejection(max_k2=0.5, mean_k3=None)
    mean = TrustRegionRejection(max_k2=None, mean_k3=0.1)
    both = TrustRegionRejection(max_k2=0.5, mean_k3=0.1)
    assert [all(x) for x in kept(worst, responses)] == [False, False, True, True]
    assert [all(x) for x in kept(mean, responses)] == [False, False, False, True]
    assert [all(x) for x in kept(both, responses)] == [False, False, False, True]
    assert all(all(x) == any(x) for x in kept(both, responses))


def test_negative_veto_drops_what_follows_the_first_trigger():
    responses = [[0.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0], [-0.8, 0.0], [0.4, -0.6], [0.0, 0.9]]
    answer = kept(NegativeVetoRejection(eps=0.5), responses, [-1.0, 1.0, -1.0, -1.0, -1.0])
    assert answer == [[True, True, False, False], [True] * 4, [True, False], [True] * 2, [True] * 2]


def test_negative_veto_does_not_look_at_masked_tokens_and_not_at_other_responses():
    answer = kept(NegativeVetoRejection(eps=0.5), [[0.0, 5.0, 0.0], [0.0, 0.0]], [-1.0, -1.0], masked=(1,))
    assert answer == [[True] * 3, [True] * 2]


@pytest.mark.parametrize("rejection", EVERY)
def test_masked_tokens_are_kept(rejection):
    answer = kept(rejection, [[5.0, 5.0, 5.0], [5.0]], [-1.0, -1.0], masked=(0, 2))
    assert answer[0][0]
    assert answer[0][2]


@pytest.mark.parametrize("rejection", EVERY)
def test_nothing_is_rejected_where_nothing_differs(rejection):
    assert all(all(x) for x in kept(rejection, [[0.0, 0.0], [0.0]], [-1.0, 1.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 700.0, -700.0])
@pytest.mark.parametrize("rejection", EVERY)
def test_extremes_reject_the_response_or_what_follows(rejection, value):
    answer = kept(rejection, [[0.0, value, 0.0], [0.0]], [-1.0, -1.0])
    expected = [False] * 3
    if rejection.kind == "negative_veto":
        expected = [True, True, False]
    if rejection.kind == "off_policy" and value > 0:
        expected = [True] * 3  # the policy has come closer to the response
    assert answer == [expected, [True]]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize(("preset", "plain"), [("seqclip", "gspo"), ("opsm", "grpo"), ("trm", "grpo")])
def test_rejected_responses_stay_in_the_denominator(preset, plain, aggregation):
    """The first and the last response are far off, so their terms vanish; those of the others are what they were."""
    batch = make_batch([5, 6, 7, 8, 4], drift=0.0)
    far = (batch.sequence == 0) | (batch.sequence == 4)
    logp = torch.where(far, batch.behavior_logp - 1.2, batch.behavior_logp + 1e-4)
    batch = replace(batch, logp=logp, advantage=-batch.advantage.abs())
    loss, gradient = loss_and_gradient(objective_of(preset, aggregation), batch, reference=False)
    # without the clip on the far ones, a gradient that is 0 could only come from the rejection
    unclipped = {"boundary": {"low": 0.9, "high": 0.9}}
    _, full = loss_and_gradient(objective_of(plain, aggregation, **unclipped), batch, reference=False)
    assert (full != 0)[batch.loss_mask].all()
    assert (gradient[far] == 0).all()
    torch.testing.assert_close(gradient[~far], full[~far])
    kept = replace(batch, loss_mask=batch.loss_mask & ~far)
    alone = loss_of(objective_of(plain, aggregation), kept, batch.counts, None, reference=False).loss
    torch.testing.assert_close(loss, alone)


def test_the_penalty_of_a_rejected_response_remains():
    batch = make_batch([5, 6], drift=0.5)
    objective = objective_of("trm", kl_coef=0.5, reject=[{"kind": "trust_region", "max_k2": 1e-9, "mean_k3": None}])
    loss, gradient = loss_and_gradient(objective, batch, reference=False)
    assert loss == 0
    assert gradient.abs().sum() == 0
    loss, gradient = loss_and_gradient(objective, batch)
    assert loss > 0
    assert gradient[batch.loss_mask].abs().min() > 0


def test_several_rejections_keep_what_all_keep():
    batch = make_batch([6, 5, 9, 4, 8], drift=0.3)
    batch = replace(batch, advantage=-torch.ones_like(batch.advantage))
    first, second = {"kind": "k3", "of": "policy", "limit": 0.05}, {"kind": "negative_veto", "eps": 0.3}
    gradients = [
        loss_and_gradient(objective_of("pg-is", reject=reject), batch, reference=False)[1] != 0
        for reject in ([first], [second], [first, second])
    ]
    assert torch.equal(gradients[2], gradients[0] & gradients[1])
    assert (gradients[0] & ~gradients[1]).any()
    assert (gradients[1] & ~gradients[0]).any()
