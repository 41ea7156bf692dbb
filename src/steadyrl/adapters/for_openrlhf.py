"""An objective inside OpenRLHF, in the place of its `PolicyLoss`.

OpenRLHF has no setting for the loss. `install(objective)` replaces the class that its actor builds; it has to run in
every worker before the actor is made, through `worker_process_setup_hook` of Ray's runtime environment. OpenRLHF's
`rollout_log_probs` are the engine's, its `old_log_probs` the trainer's own at the start of the batch ("step_start").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError

OPENRLHF = Framework(
    "OpenRLHF",
    {"rollout": "rollout_log_probs", "step_start": "old_log_probs"},
    {
        "aggregation": "--actor.loss_agg_mode",
        "aggregation_tokens": "--actor.loss_agg_mode",
        "advantage": "--algo.advantage.estimator",
        "kl_coef": "--algo.kl.use_loss and --algo.kl.init_coef",
    },
)
RESULTS = ("clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")  # beside the loss; 0.11.0 had no is_filter_ratio


class ObjectivePolicyLoss(torch.nn.Module):
    """What OpenRLHF's actor calls, made with the arguments of its own `PolicyLoss`."""

    def __init__(
        self,
        objective: str | Mapping[str, Any],
        steps_per_batch: int | None,
        reduce: Callable[..., Tensor],
        num_results: int = len(RESULTS),
        token_level_loss: bool = True,
        **own: Any,
    ) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}  # of the last call, beside what OpenRLHF has a place for
        self._objective = settings.objective_for(OPENRLHF, objective, steps_per_batch)
        self._reduce, self._per_token, self._num_results = reduce, token_level_loss, num_results
        if own.get("policy_loss_type", "ppo") != "ppo" or own.get("dual_clip") is not None:
            raise ConfigError(
                "the objective replaces OpenRLHF's loss: leave out --actor.policy_loss_type and dual_clip"
            )

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        **counts: Any,
    ) -> tuple[Any, ...]:
        """OpenRLHF's contract: the loss, then `RESULTS`. All tensors are [B, A]."""
        if rollout_log_probs is None and (
            self._objective.anchor == "rollout" or settings.compares_engine(self._objective)
        ):
            raise ConfigError(
                "OpenRLHF keeps the engine's log-probabilities only with --algo.advantage.is_correction_level token: "
                "set it; the weights of that correction belong to OpenRLHF's own loss and are not applied"
            )

        def reduce(terms: Tensor) -> Tensor:
            return self._reduce(terms, action_mask, token_level_loss=self._per_token, **counts)

        tokens = common.from_padded(
            action_mask,
            logp=log_probs,
            advantage=advantages,
            share=common.shares_of(reduce, log_probs),
            behavior_logp=rollout_log_probs,
            old_logp=old_log_probs,
        )
        outcome = common.objective_loss(self._objective, tokens, all_reduce=common.sum_over_data_parallel())
        self.metrics = common.means(outcome)
        found = self.metrics
        removed = found["objective/clip_low"] + found["objective/clip_high"]
        kl = _mean(old_log_probs - log_probs.detach(), action_mask)
        vllm_kl = None if rollout_log_probs is None else _mean(rollout_log_probs - old_log_probs, action_mask)
        results = (log_probs.new_tensor(removed), kl, vllm_kl, log_probs.new_tensor(found.get("correction/zero", 0.0)))
        return outcome.loss, *results[: self._num_results]


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), values, 0.0).sum() / mask.sum().clamp(min=1)


def install(objective: str | Mapping[str, Any] = "sat-gspo", steps_per_batch: int | None = None) -> None:
    """Let OpenRLHF's actor build `ObjectivePolicyLoss`, and report its metrics with its own.

    Args:
        objective: a preset's name, or the keys of an [objective] table.
        steps_per_batch: optimizer steps on each batch of rollouts, for the anchor "step_start".
    """
    from openrlhf.models import aggregate_loss  # pyright: ignore[reportMissingImports]
    from openrlhf.trainer.ray import ppo_actor  # pyright: ignore[reportMissingImports]

    own_step = ppo_actor.ActorPPOTrainer.training_step

    def build(**own: Any) -> ObjectivePolicyLoss:
        # the older constructor goes with four results instead of five
        number = len(RESULTS) - (0 if "is_correction_level" in own else 1)
        return ObjectivePolicyLoss(objective, steps_per_batch, aggregate_loss, number, **own)

    def training_step(trainer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        status = own_step(trainer, *args, **kwargs)
        for name, value in trainer.actor_loss_fn.metrics.items():
            status["metrics"][name], status["weights"][name] = torch.tensor(value), "token"
        return status

    ppo_actor.PolicyLoss = build
    ppo_actor.ActorPPOTrainer.training_step = training_step
