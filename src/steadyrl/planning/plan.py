"""Memory, traffic and time of a recipe, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.planning.lengths import MeanLengths, mean_lengths
from steadyrl.planning.measure import measured_speed
from steadyrl.planning.memory import MemoryPlan, memory_plan
from steadyrl.planning.model_count import count_model
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.placement import Placement, placement_of
from steadyrl.planning.rates import Speed, cache_room, stated_speed
from steadyrl.planning.simulate import simulate
from steadyrl.planning.trainer_clock import Prediction
from steadyrl.planning.work import Traffic, traffic
from steadyrl.recipe import build_config


@dataclass(frozen=True)
class Plan:
    shape: ModelShape
    placement: Placement
    lengths: MeanLengths
    memory: MemoryPlan
    cache_room: float | None  # tokens, in all engines
    traffic: list[Traffic]
    speed: Speed
    predictions: list[Prediction]
    refused: dict[str, str]  # regimes that the recipe cannot have, and why

    def as_json(self) -> dict[str, Any]:
        return {
            "model": {**dataclasses.asdict(self.shape), "active_parameters": self.shape.active_parameters},
            "placement": dataclasses.asdict(self.placement),
            "lengths": dataclasses.asdict(self.lengths),
            "memory": dataclasses.asdict(self.memory),
            "cache_room_tokens": self.cache_room,
            "traffic": [dataclasses.asdict(item) for item in self.traffic],
            "rates": {
                "source": self.speed.source,
                "assumed": sorted(self.speed.assumed),
                **self.speed.rates.model_dump(),
                "hardware": None if self.speed.hardware is None else self.speed.hardware.model_dump(),
            },
            "predictions": [dataclasses.asdict(prediction) for prediction in self.predictions],
            "refused": self.refused,
        }


def make_plan(
    recipe: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    from_run: Path | None,
    rates: Path | None,
    all_regimes: bool,
    steps: int,
) -> Plan:
    """Plan the recipe as it is, and with `all_regimes` in the other two regimes as well.

    Raises:
        ConfigError: recipe, run or file of rates cannot be used.
    """
    if from_run is not None and rates is not None:
        raise ConfigError("rates come from a run or from a file: give one of --from-run and --rates")
    config = build_config(recipe, overrides)
    shape = count_model(config.model.path)
    speed = stated_speed(rates, shape, config) if from_run is None else measured_speed(from_run)
    placement = placement_of(config, 1 if speed.hardware is None else speed.hardware.gpus_per_engine)
    lengths = mean_lengths(speed.lengths, config.pipeline.responses_per_prompt, config.sampling.max_response_tokens)
    predictions, refused = [simulate(config, shape, speed, steps=steps)], {}
    for regime, changes in _others(config) if all_regimes else ():
        try:
            other = build_config(recipe, [*overrides, *changes])
        except ConfigError as error:
            refused[regime] = str(error)
        else:
            predictions.append(simulate(other, shape, speed, steps=steps))
    return Plan(
        shape=shape,
        placement=placement,
        lengths=lengths,
        memory=memory_plan(shape, config, placement, lengths),
        cache_room=cache_room(shape, config, placement, speed),
        traffic=traffic(shape, config, placement, lengths),
        speed=speed,
        predictions=predictions,
        refused=refused,
    )


def _others(config: RunConfig) -> list[tuple[str, list[str]]]:
    """Overrides that lead to the other regimes, with lags of the same size."""
    pipeline = config.pipeline
    lag = max(1, pipeline.max_lag if pipeline.regime == "streaming" else pipeline.lag)
    changes = {
        "sync": ["pipeline.regime=sync", "pipeline.lag=0"],
        "batch": ["pipeline.regime=batch", f"pipeline.lag={lag}"],
        "streaming": ["pipeline.regime=streaming", "pipeline.lag=1", f"pipeline.max_lag={lag}"],
    }
    return [(regime, change) for regime, change in changes.items() if regime != pipeline.regime]
