"""What each clip rule would have done to the recorded tokens: every preset that can be answered from them.

The numbers are those of `objective.loss.policy_loss` on the whole optimizer step, with the advantages of the dump.
Two presets that treat every token alike (they differ in the aggregation, the advantages or the penalties) are one rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadyrl.axes import SatBoundary
from steadyrl.errors import ConfigError
from steadyrl.inspection.archive import Block, Step
from steadyrl.method import ObjectiveConfig, nearest
from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.objective.loss import policy_loss
from steadyrl.presets import PRESETS
from steadyrl.types import BatchCounts, Sums, add_sums, pooled

ALWAYS = ("grpo", "sat-grpo", "gspo", "sat-gspo")  # what SAT would have changed is a comparison of these


@dataclass(frozen=True)
class Rule:
    """One way to treat tokens, and the presets that share it."""

    presets: tuple[str, ...]
    objective: ObjectiveConfig

    @property
    def name(self) -> str:
        return self.presets[0]

    @property
    def needs_old(self) -> bool:
        return self.objective.needs_old_logp

    @property
    def needs_age(self) -> bool:
        boundary = self.objective.boundary
        by_lag = isinstance(boundary, SatBoundary) and boundary.quantile_scope == "lag"
        return by_lag or self.objective.anchor == "prox_approx"


@dataclass
class RuleTotals:
    """What a rule did, over all steps it could be asked about."""

    rule: Rule
    steps: int = 0
    sums: Sums = field(default_factory=dict)
    strongest: float = 1.0  # smallest factor of SAT on a radius
    missing: str = ""  # why some steps, or all, could not be answered

    def means(self) -> dict[str, float]:
        return pooled(self.sums)


@dataclass(frozen=True)
class BlockOutcome:
    """What a rule did to one block."""

    sums: Sums
    marks: dict[str, Tensor]  # [T] bool: outside, removed, no_gradient, and of SAT gated and intervened
    strongest: float


def select_rules(names: Iterable[str] | None = None) -> tuple[list[Rule], dict[str, str]]:
    """The rules behind some presets (None: all), and the presets that no dump can answer, with the reason.

    Raises:
        ConfigError: an unknown preset.
    """
    wanted = list(PRESETS) if names is None else [*ALWAYS, *filter(None, names)]
    refused: dict[str, str] = {}
    grouped: dict[str, list[str]] = {}
    for name in dict.fromkeys(wanted):
        if name not in PRESETS:
            raise ConfigError(f"no objective is called {name!r}{nearest(name, PRESETS)}: steadyrl methods lists them")
        objective = _objective(name)
        reason = _out_of_reach(objective)
        if reason:
            refused[name] = reason
        else:
            grouped.setdefault(_treatment(objective), []).append(name)
    return [Rule(tuple(presets), _objective(presets[0])) for presets in grouped.values()], refused


def unanswered(rule: Rule, step: Step) -> str:
    """Why this step says nothing about this rule, or nothing."""
    if rule.needs_old and not step.has_old:
        return "needs old_logp, the trainer's log-probabilities with the weights that sampled"
    if rule.needs_age and not step.has_age:
        return "needs the version of every token and train_version"
    return ""


def threshold_key(rule: Rule) -> str:
    """Rules with the same key have the same threshold on every step."""
    objective = rule.objective
    boundary = objective.boundary
    # the gate's place does not depend on the shape of its kernel, nor on the radii
    fields = (
        {"alpha", "quantile_weight", "quantile_scope"}
        if isinstance(boundary, SatBoundary)
        else set(type(boundary).model_fields)
    )
    parts = [objective.anchor, objective.unit, boundary.rule, boundary.model_dump(include=fields)]
    return json.dumps(parts, sort_keys=True)


def apply_rule(rule: Rule, block: Block, step: Step, threshold: Tensor | None) -> BlockOutcome:
    """The rule on one block of a step, as it acts in training."""
    counts = BatchCounts(num_tokens=step.num_tokens, num_sequences=len(step.responses))
    logp = block.logp.clone().requires_grad_()
    output = policy_loss(
        rule.objective,
        logp=logp,
        behavior_logp=block.behavior_logp,
        advantage=block.advantage,
        layout=block.layout,
        counts=counts,
        old_logp=block.old_logp,
        age=block.age,
        threshold=threshold,
    )
    (gradient,) = torch.autograd.grad(output.loss, logp)
    weight = aggregation_weight(rule.objective, block.layout, counts)
    size = block.advantage.abs().double()
    lost = (gradient == 0) & (size > 0)
    tokens = size.new_tensor(float(len(size)))
    sums: Sums = {
        **output.sums,
        "inspect/no_gradient": (lost.sum(dtype=torch.float64), tokens),
        "inspect/signal_cut": ((size * lost).sum(), size.sum()),
        # against the policy gradient without ratios; a token's weight in the loss cancels
        "inspect/gradient_kept": (gradient.abs().double().sum(), (weight.double() * size).sum()),
    }
    strongest = float(output.extremes.get("sat/min_contraction", torch.tensor(1.0)))
    return BlockOutcome(sums, {**output.marks, "no_gradient": lost}, strongest)


def add_outcome(totals: RuleTotals, outcome: BlockOutcome) -> None:
    add_sums(totals.sums, outcome.sums)
    totals.strongest = min(totals.strongest, outcome.strongest)


def _objective(name: str) -> ObjectiveConfig:
    """The preset without its penalties, which pull every token and clip none."""
    return ObjectiveConfig.model_validate({"preset": name, "kl_coef": 0.0, "log_ratio_coef": 0.0})


def _treatment(objective: ObjectiveConfig) -> str:
    return objective.model_dump_json(include={"anchor", "unit", "boundary", "correction", "reject"})


def _out_of_reach(objective: ObjectiveConfig) -> str:
    if objective.num_top_logprobs:
        return "needs the likeliest tokens, or the whole distribution, at every position"
    boundary = objective.boundary
    if isinstance(boundary, SatBoundary) and boundary.quantile_scope == "microbatch":
        return "depends on how the step was cut into micro-batches, which no dump tells"
    if isinstance(boundary, SatBoundary) and boundary.quantile_scope == "ema":
        return "depends on a moving average over all steps of the run, and a dump may lack some"
    if objective.anchor == "step_start":
        return "needs the log-probabilities before the first step on each batch beside those of this step"
    return ""
