"""The lag controller: notches, limits, hysteresis, and a budget that holds on a drift that follows the lag."""

from __future__ import annotations

import pytest

from steadyrl.config import ControllerConfig, PipelineConfig, RunConfig
from steadyrl.pipeline.controller import Controller, Settings, decide

PIPELINE = PipelineConfig(regime="streaming", lag=1, max_lag=8, prompts_per_batch=8)
D_BAR = ControllerConfig(budget=0.02, every_steps=4)


@pytest.mark.parametrize(
    ("measured", "before", "after"),
    [
        (0.025, (3, 40), (2, 40)),  # beyond: broadcast more often first
        (0.025, (1, 40), (1, 30)),  # then fewer groups
        (0.03, (3, 40), (1, 40)),  # half too much: 3/4 is not enough, 9/16 is
        (0.06, (2, 40), (1, 16)),  # three times: 40 to 30, 22, 16
        (0.03, (1, 9), (1, 8)),  # no fewer than a step needs
        (0.03, (1, 8), None),
        (0.02, (1, 40), None),  # at the budget
        (0.0141, (1, 40), None),  # within the slack
        (0.0139, (1, 40), (1, 54)),
        (0.0139, (1, 60), (1, 72)),  # 8 (8 + 1)
        (0.0139, (1, 72), (2, 72)),
        (0.0139, (8, 72), None),  # longest_broadcast_interval
    ],
)
def test_notches_are_as_many_as_needed_and_within_the_limits(measured, before, after):
    decision = decide(D_BAR, PIPELINE, measured, Settings(*before))
    assert (decision and decision.settings) == (after and Settings(*after))


def test_an_effective_sample_size_is_better_the_higher_it_is():
    config = ControllerConfig(measure="ess", budget=0.8)
    assert decide(config, PIPELINE, 0.7, Settings(1, 40)).settings == Settings(1, 30)
    assert decide(config, PIPELINE, 0.85, Settings(1, 40)) is None
    assert decide(ControllerConfig(measure="ess", budget=0.5), PIPELINE, 0.9, Settings(1, 40)).settings == Settings(
        1, 54
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.1, "fewest_groups_in_flight": 50, "most_groups_in_flight": 5}, "is above most_groups_in_flight"),
        ({"measure": "ess", "budget": 2}, "set it to 1 or less"),
    ],
)
def test_a_budget_or_limits_that_cannot_be_kept_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ControllerConfig(**settings)


def test_more_groups_in_flight_than_the_bound_lets_in_are_refused():
    table = {"controller": {"budget": 0.1, "fewest_groups_in_flight": 500}, "regime": "streaming", "lag": 1}
    with pytest.raises(ValueError, match=r"more than pipeline\.max_lag ever lets in, 288"):
        RunConfig.model_validate({"pipeline": {**table, "max_lag": 8, "prompts_per_batch": 32}})


def test_the_mean_of_a_window_decides_and_steps_without_a_number_do_not_count():
    controller = Controller(D_BAR, PIPELINE)
    values = [0.01, float("nan"), 0.05, 0.01, 0.05]
    decisions = [controller.observe({"mismatch/d_bar": value}, Settings(1, 40)) for value in values]
    assert decisions[:4] == [None] * 4
    assert decisions[4].settings == Settings(1, 22)
    assert decisions[4].reason == "d_bar 0.03 against a budget of 0.02: fresher"
    assert controller.observe({"mismatch/d_bar": 0.05}, Settings(1, 30)) is None  # a new window


def test_a_drift_that_triples_is_brought_back_into_the_budget_and_stays_there():
    """Drift as rate x (groups in flight, in steps + broadcast interval): the settings settle on both sides."""
    controller, settings, history = Controller(D_BAR, PIPELINE), Settings(1, 16), []
    for step in range(400):
        rate = 0.002 if step < 200 else 0.006
        drift = rate * (settings.groups_in_flight / 8 + settings.broadcast_every)
        decision = controller.observe({"mismatch/d_bar": drift}, settings)
        settings = decision.settings if decision else settings
        history.append((drift, settings))
    for before, until in ((100, 200), (300, 400)):
        settled = history[before:until]
        assert {one for _, one in settled} == {settled[0][1]}  # no going back and forth
        assert settled[0][0] <= 0.02
    assert history[199][1].groups_in_flight > history[399][1].groups_in_flight
