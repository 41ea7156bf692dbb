"""What a boundary rule sees, and what it answers. Everything here is detached."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Which tokens count, and which response each belongs to."""

    loss_mask: Tensor  # [T] bool
    sequence: Tensor  # [T] int64, 0 .. S - 1
    num_sequences: int  # S


@dataclass(frozen=True)
class RuleInput:
    """What a rule may look at; all [T], detached, in float32 or float64, and 0 where masked."""

    log_ratio: Tensor  # in the objective's unit
    advantage: Tensor
    logp: Tensor  # of the token, under the policy being trained
    anchor_logp: Tensor
    layout: Layout
    divergence: Tensor | None = None  # [T] of the state the token was drawn in, for rules that need distributions
    threshold: Tensor | None = None  # 0-d, of a rule that is relative to the batch, where the batch is more than this


@dataclass(frozen=True)
class BoundaryOutput:
    """What a rule says about every token; all [T] and detached."""

    surrogate: Tensor  # S, the textbook value
    coefficient: Tensor  # dS / d(log ratio) = coefficient * advantage
    outside: Tensor  # bool, beyond the rule's limit, whatever the advantage; false for a rule without one
    removed_low: Tensor  # bool, the gradient is removed, ratio below 1
    removed_high: Tensor  # bool, the gradient is removed, ratio 1 or above
    radius_low: Tensor | None = None  # effective radii, for intervals
    radius_high: Tensor | None = None
    # A ratio's slope in a token's log-probability depends on the unit. The weight of a policy gradient
    # w * A * logp does not.
    is_weight: bool = False

    @property
    def removed(self) -> Tensor:
        return self.removed_low | self.removed_high
