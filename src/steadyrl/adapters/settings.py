"""From another trainer's settings to an objective, and what is refused on the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from steadyrl.axes import M2poBoundary, SatBoundary
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig

logger = logging.getLogger("steadyrl")


@dataclass(frozen=True, eq=False)
class Framework:
    """What a trainer hands to its loss, and what it decides itself."""

    name: str
    anchors: Mapping[str, str]  # anchor of the objective -> what the trainer calls these log-probabilities
    decides: Mapping[str, str]  # key of the objective that the trainer decides -> its own setting for it
    has_behavior: bool = True  # whether the engine's log-probabilities come beside those of another anchor
    one_response: bool = False  # whether the loss is called for each response alone


def objective_for(
    framework: Framework, settings: str | Mapping[str, Any], steps_per_batch: int | None = None
) -> ObjectiveConfig:
    """The objective that the trainer's configuration asks for, checked against what the trainer can give.

    Args:
        framework: the trainer.
        settings: a preset's name, or a mapping with the keys of the `[objective]` table of a recipe.
        steps_per_batch: optimizer steps on each batch, where the anchor is the policy before the first of them.

    Raises:
        ConfigError: unknown names and values, keys that the trainer decides, log-probabilities that it does not
            have, and an anchor with which every ratio is 1.
    """
    return _checked(framework, json.dumps(_plain(settings), sort_keys=True), steps_per_batch)


@lru_cache(maxsize=64)
def _checked(framework: Framework, settings: str, steps_per_batch: int | None) -> ObjectiveConfig:
    table = json.loads(settings)
    for key in table if isinstance(table, dict) else ():
        if key in framework.decides:
            raise ConfigError(f"{framework.name} decides {key} itself: leave it out and set {framework.decides[key]}")
    try:
        objective = ObjectiveConfig.model_validate(table)
    except ValidationError as error:
        problems = (item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise ConfigError(f"objective for {framework.name}: {'; '.join(problems)}") from None
    for problem in _problems(framework, objective, steps_per_batch):
        raise ConfigError(problem)
    logger.info("%s uses the objective %s", framework.name, objective.describe())
    return objective


def _problems(framework: Framework, objective: ObjectiveConfig, steps_per_batch: int | None) -> Iterator[str]:
    name, rule, anchor = framework.name, objective.boundary, objective.anchor
    if anchor not in framework.anchors:
        known = " or ".join(f"anchor = {key!r} ({where})" for key, where in framework.anchors.items())
        yield f"{name} has no log-probabilities for anchor = {anchor!r}: set {known}"
    if anchor == "step_start" and (steps_per_batch is None or steps_per_batch < 2):
        yield (
            f"with anchor = 'step_start' and one optimizer step per batch every ratio is 1 and the {rule.rule} rule "
            f"does nothing: take several steps on each batch and tell steps_per_batch, or set anchor = 'rollout'"
        )
    if compares_engine(objective) and not framework.has_behavior:
        yield (
            f"{name} does not hand the engine's log-probabilities to its loss beside {framework.anchors[anchor]}: "
            f"leave out the correction and the rejection of the objective, and use those of {name}"
        )
    if needs_age(objective) and "prox_approx" not in framework.anchors:
        yield f"{name} does not hand the version of a token to its loss: set boundary.quantile_scope to batch"
    if objective.num_top_logprobs:
        yield f"the rule {rule.rule!r} with these settings needs distributions, and {name} hands over sampled tokens"
    if isinstance(rule, SatBoundary) and rule.quantile_scope == "ema":
        yield (
            f"a loss inside {name} does not know where an optimizer step ends, so it cannot average the quantile over "
            "steps: set boundary.quantile_scope to batch or microbatch"
        )


def compares_engine(objective: ObjectiveConfig) -> bool:
    """Whether it has a correction or a rejection for what lies between the anchor and the engine."""
    return objective.correction is not None or any(getattr(item, "of", "") == "mismatch" for item in objective.reject)


def needs_age(objective: ObjectiveConfig) -> bool:
    """Whether the lag of every token has to be known."""
    rule = objective.boundary
    return objective.anchor == "prox_approx" or (isinstance(rule, SatBoundary) and rule.quantile_scope == "lag")


def is_batch_relative(objective: ObjectiveConfig) -> bool:
    """Whether a number is taken from the whole batch before the first token's loss is known."""
    rule = objective.boundary
    return isinstance(rule, M2poBoundary) or (isinstance(rule, SatBoundary) and rule.quantile_scope == "batch")


def refuse_second_weight(framework: Framework, objective: ObjectiveConfig, weighted_by: str) -> None:
    """Refuse an importance weight of the trainer's on top of what the objective already holds.

    Args:
        weighted_by: the trainer's setting that makes its weight, and what to set it to.

    Raises:
        ConfigError: the ratio of the objective goes to the engine, or the objective has a correction of its own.
    """
    if objective.anchor == "rollout":
        raise ConfigError(
            f"with anchor = 'rollout' the ratio is already taken against the engine, and the importance weights of "
            f"{framework.name} would count the mismatch twice: {weighted_by}"
        )
    if objective.correction is not None:
        raise ConfigError(
            f"the objective has a {objective.correction.kind} correction and {framework.name} a weight for the same "
            f"mismatch, which would be applied twice: {weighted_by}, or leave out the correction"
        )


def _plain(value: Any) -> Any:
    """Nested mappings and sequences, whatever configuration library made them, as JSON knows them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def refuse_without_effect(framework: Framework, given: Any, neutral: Mapping[str, Any]) -> None:
    """Refuse the trainer's settings of its own loss, which is replaced.

    Args:
        given: an object with the settings as attributes; a missing one is neutral.
        neutral: the value of each setting with which it does nothing.

    Raises:
        ConfigError: a setting has another value.
    """
    for name, value in neutral.items():
        if getattr(given, name, value) != value:
            raise ConfigError(f"{name} belongs to {framework.name}'s own loss, which is replaced: set {name}={value!r}")
