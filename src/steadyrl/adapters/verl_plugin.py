"""What verl imports, through VERL_USE_EXTERNAL_MODULES=steadyrl.adapters.verl_plugin: it needs verl to be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.trainer.ppo.core_algos import register_policy_loss  # pyright: ignore[reportMissingImports]
from verl.workers.config import PolicyLossConfig  # pyright: ignore[reportMissingImports]

from steadyrl.adapters.for_verl import objective_of, policy_loss


@dataclass
class ObjectivePolicyLossConfig(PolicyLossConfig):
    """The `_target_` of actor_rollout_ref.actor.policy_loss; it checks itself when verl makes it."""

    loss_mode: str = "steadyrl"
    objective: Any = "sat-gspo"  # a preset's name, or the keys of an [objective] table
    bypass_mode: bool = False  # that of algorithm.rollout_correction
    steps_per_batch: int = 1  # optimizer steps: train_batch_size / ppo_mini_batch_size * ppo_epochs

    def __post_init__(self) -> None:
        objective_of(self)


register_policy_loss("steadyrl")(policy_loss)
