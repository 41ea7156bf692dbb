"""What each clip rule would have done to the tokens of a recorded batch.

Nothing is re-implemented: the answer is that of `objective.loss.policy_loss`, on the log-probabilities and advantages
that were recorded when the batch was trained on. The quantile of SAT is taken over the rollouts of one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steadyrl.axes import ClipBoundary, SatBoundary
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import anchor_of, policy_loss
from steadyrl.objective.ratio import unit_log_ratio
from steadyrl.objective.rule import Layout
from steadyrl.reports.recorder import Row
from steadyrl.types import BatchCounts

# One letter per token
KEPT, REMOVED_LOW, REMOVED_HIGH = ".", "l", "h"
GATED_LOW, GATED_HIGH = "g", "G"  # interval narrowed by SAT, gradient kept
BOTH_LOW, BOTH_HIGH = "m", "M"  # interval narrowed, gradient removed; the plain clip would have removed it, too
SAT_LOW, SAT_HIGH = "L", "H"  # gradient removed by the narrowing alone
NOT_SAMPLED = " "
GATES = ((GATED_LOW, BOTH_LOW, SAT_LOW), (GATED_HIGH, BOTH_HIGH, SAT_HIGH))  # by the side of the ratio

COMPARED = {"grpo": "GRPO clip", "sat-grpo": "SAT-GRPO", "gspo": "GSPO clip", "sat-gspo": "SAT-GSPO", "dppo-tv": "DPPO"}


@dataclass(frozen=True)
class Rule:
    name: str  # "this run" among it where it is the one that trained
    objective: ObjectiveConfig

    @property
    def about(self) -> str:
        """The ratio and the numbers of the rule, in a line."""
        rule = self.objective.boundary.model_dump(
            include={"low", "high", "alpha", "kernel", "threshold", "cap", "dual"}
        )
        numbers = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in rule.items()
        ]
        return ", ".join([f"{self.objective.unit} ratio against {self.objective.anchor}", *map(str, numbers)])


@dataclass(frozen=True)
class Verdict:
    """On one rollout."""

    letters: str  # [n]
    q: float | None  # quantile of SAT in the rollout's optimizer step


def rules_of(config: Mapping[str, Any]) -> list[Rule]:
    """The rules to compare, with the radii and the anchor of the run's recipe, and the run's own rule."""
    own = own_objective(config)
    rules = []
    is_listed = False
    for preset, name in COMPARED.items():
        objective = _like(preset, own)
        is_own = own is not None and (own.unit, own.boundary) == (objective.unit, objective.boundary)
        is_listed = is_listed or is_own
        rules.append(Rule(f"{name} (this run)" if is_own else name, objective))
    if own is not None and not is_listed and own.num_top_logprobs == 0:
        rules.insert(0, Rule(f"{own.preset or own.boundary.rule} (this run)", own))
    return rules


def can_judge(rollout: Row, needs_old_logp: bool) -> bool:
    """Whether the rollout was recorded with what the trainer said about it, whole and finite."""
    size = len(rollout["loss_mask"])
    names = ["behavior_logp", "versions", "trainer_logp", *(["old_logp"] if needs_old_logp else [])]
    rows = [rollout.get(name) for name in names]
    if not all(isinstance(row, list) and len(row) == size and all(map(is_finite, row)) for row in rows):
        return False
    return any(rollout["loss_mask"]) and is_finite(rollout.get("advantage")) and is_finite(rollout.get("train_version"))


def judge(objective: ObjectiveConfig, rollouts: Sequence[Row]) -> list[Verdict]:
    """What the rule does to each token of each rollout; all of them `can_judge`."""
    steps: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        steps.setdefault(rollout["train_version"], []).append(index)
    verdicts: dict[int, Verdict] = {}
    for members in steps.values():
        found = _judge_step(objective, [rollouts[index] for index in members])
        verdicts |= dict(zip(members, found, strict=True))
    return [verdicts[index] for index in range(len(rollouts))]


def _judge_step(objective: ObjectiveConfig, rollouts: list[Row]) -> list[Verdict]:
    sizes = [len(rollout["loss_mask"]) for rollout in rollouts]
    layout = Layout(
        loss_mask=_flat(rollouts, "loss_mask").bool(),
        sequence=torch.arange(len(rollouts)).repeat_interleave(torch.tensor(sizes)),
        num_sequences=len(rollouts),
    )
    logp, behavior_logp = _flat(rollouts, "trainer_logp"), _flat(rollouts, "behavior_logp")
    old_logp = _flat(rollouts, "old_logp") if objective.needs_old_logp else None
    lag = torch.tensor([float(rollout["train_version"]) for rollout in rollouts])[layout.sequence]
    age = torch.where(layout.loss_mask, lag - _flat(rollouts, "versions"), 0.0).long()
    output = policy_loss(
        objective,
        logp=logp,
        behavior_logp=behavior_logp,
        advantage=torch.tensor([float(rollout["advantage"]) for rollout in rollouts])[layout.sequence],
        layout=layout,
        counts=BatchCounts(int(layout.loss_mask.sum()), len(rollouts)),
        old_logp=old_logp,
        age=age,
    )
    anchor_logp = anchor_of(objective, logp, behavior_logp, old_logp, age)
    is_low = unit_log_ratio(objective.unit, logp, anchor_logp, layout) < 0
    letters = _letters(output.marks, is_low, layout.loss_mask)
    q = None
    if "sat/q" in output.sums:
        total, count = output.sums["sat/q"]
        q = float(total) / float(count)
    return [Verdict("".join(part), q) for part in _cut(letters, sizes)]


def _letters(marks: Mapping[str, Tensor], is_low: Tensor, loss_mask: Tensor) -> list[str]:
    nothing = torch.zeros_like(loss_mask)
    columns = (loss_mask, marks["removed"], marks.get("gated", nothing), marks.get("intervened", nothing), is_low)
    letters = []
    for sampled, removed, gated, intervened, low in zip(*(column.tolist() for column in columns), strict=True):
        if not sampled:
            letters.append(NOT_SAMPLED)
        elif intervened:
            letters.append(SAT_LOW if low else SAT_HIGH)
        elif gated and removed:
            letters.append(BOTH_LOW if low else BOTH_HIGH)
        elif gated:
            letters.append(GATED_LOW if low else GATED_HIGH)
        elif removed:
            letters.append(REMOVED_LOW if low else REMOVED_HIGH)
        else:
            letters.append(KEPT)
    return letters


def _like(preset: str, own: ObjectiveConfig | None) -> ObjectiveConfig:
    """A preset with the run's radii, its kind of SAT, and its anchor."""
    objective = ObjectiveConfig.model_validate({"preset": preset, "kl_coef": 0.0})
    if own is None:
        return objective
    rule = objective.boundary
    if isinstance(rule, SatBoundary) and isinstance(own.boundary, SatBoundary):
        rule = own.boundary
    elif isinstance(rule, ClipBoundary | SatBoundary) and isinstance(own.boundary, ClipBoundary | SatBoundary):
        rule = rule.model_copy(update={"low": own.boundary.low, "high": own.boundary.high})
    elif isinstance(rule, type(own.boundary)):
        rule = own.boundary
    anchor = own.anchor if own.anchor != "prox_approx" else "rollout"
    return objective.model_copy(update={"boundary": rule, "anchor": anchor})


def own_objective(config: Mapping[str, Any]) -> ObjectiveConfig | None:
    """The run's objective; None where this version does not know it. Its quantile is taken over the batch."""
    try:
        own = ObjectiveConfig.model_validate(config.get("objective", {}))
    except ValueError:
        return None
    if isinstance(own.boundary, SatBoundary) and own.boundary.quantile_scope in ("microbatch", "ema"):
        own = own.model_copy(update={"boundary": own.boundary.model_copy(update={"quantile_scope": "batch"})})
    return own


def _flat(rollouts: Sequence[Row], name: str) -> Tensor:
    """[T] float32, one rollout after the other."""
    return torch.tensor([float(value) for rollout in rollouts for value in rollout[name]], dtype=torch.float32)


def _cut(letters: list[str], sizes: Sequence[int]) -> list[list[str]]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [letters[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
