"""A controller for the lag: it keeps a measure of drift within a budget by how stale it lets the data become. Pure.

Two settings steer how old tokens are in the streaming regime: how many groups are in flight, and how often weights are
broadcast. Fresh data wastes the engine's or the trainer's time; old data drifts. Every `every_steps` the controller
compares the mean of the measure over these steps with the budget:

    beyond the budget                    fresher: broadcast more often, then fewer groups in flight; as many notches as
                                         would bring it back if it followed the lag
    within `slack` of the budget         nothing: the hysteresis that keeps it from going back and forth
    well inside                          one notch staler: more groups in flight, then broadcast less often

A notch is a factor of 3/4 or 4/3 on the groups, and one step on the broadcast interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from steadyrl.config import ControllerConfig, PipelineConfig

NOTCH = 0.75
MEASURES = {"d_bar": "mismatch/d_bar", "ess": "mismatch/ess_token"}


@dataclass(frozen=True)
class Settings:
    """What the controller sets."""

    broadcast_every: int  # optimizer steps
    groups_in_flight: int


@dataclass(frozen=True)
class Decision:
    settings: Settings
    reason: str


class Controller:
    """Collects the measure over a window of steps; `observe` decides at the end of each."""

    def __init__(self, config: ControllerConfig, pipeline: PipelineConfig) -> None:
        self._config = config
        self._pipeline = pipeline
        self._window: list[float] = []

    def observe(self, metrics: dict[str, float], settings: Settings) -> Decision | None:
        """Take in a step's metrics; a decision at the end of a window, if there is something to change."""
        value = metrics.get(MEASURES[self._config.measure], math.nan)
        if math.isfinite(value):
            self._window.append(value)
        if len(self._window) < self._config.every_steps:
            return None
        mean, self._window = fmean(self._window), []
        return decide(self._config, self._pipeline, mean, settings)


def decide(config: ControllerConfig, pipeline: PipelineConfig, measured: float, settings: Settings) -> Decision | None:
    """The next settings, or None where the measure is near its budget or the settings are at their limit."""
    # as a share of the budget, above 1 where it is exceeded; an ESS is better the higher it is
    used = measured / config.budget if config.measure == "d_bar" else config.budget / max(measured, 1e-12)
    if used > 1:
        wanted, direction = settings, "fresher"
        for _ in range(math.ceil(math.log(used) / -math.log(NOTCH))):
            wanted = _fresher(config, pipeline, wanted)
    elif used < 1 - config.slack:
        wanted, direction = _staler(config, pipeline, settings), "staler"
    else:
        return None
    if wanted == settings:
        return None
    return Decision(wanted, f"{config.measure} {measured:.4g} against a budget of {config.budget:g}: {direction}")


def _fresher(config: ControllerConfig, pipeline: PipelineConfig, settings: Settings) -> Settings:
    if settings.broadcast_every > 1:
        return Settings(settings.broadcast_every - 1, settings.groups_in_flight)
    fewer = max(math.floor(settings.groups_in_flight * NOTCH), _fewest(config, pipeline))
    return Settings(settings.broadcast_every, min(fewer, settings.groups_in_flight))


def _staler(config: ControllerConfig, pipeline: PipelineConfig, settings: Settings) -> Settings:
    most = config.most_groups_in_flight or pipeline.most_groups_outstanding
    if settings.groups_in_flight < most:
        return Settings(settings.broadcast_every, min(math.ceil(settings.groups_in_flight / NOTCH), most))
    longest = min(config.longest_broadcast_interval, pipeline.max_lag + 1)
    return Settings(min(settings.broadcast_every + 1, longest), settings.groups_in_flight)


def _fewest(config: ControllerConfig, pipeline: PipelineConfig) -> int:
    """A step must be able to fill; less would only make the trainer wait."""
    return max(config.fewest_groups_in_flight, pipeline.prompts_per_batch)
