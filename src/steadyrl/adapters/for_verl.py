"""An objective inside verl, as the registered policy loss "steadyrl".

`verl_plugin.py` is what verl imports; this file holds the loss, and needs verl only when it is called. verl hands one
tensor of earlier log-probabilities to a policy loss, `old_log_prob`. With `algorithm.rollout_correction.bypass_mode`
they are the engine's (anchor "rollout"); without, the trainer's own at the start of the batch ("step_start").
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig

VERL = Framework(
    "verl",
    {"rollout": "old_log_prob with bypass_mode=True", "step_start": "old_log_prob with bypass_mode=False"},
    {
        "aggregation": "actor_rollout_ref.actor.loss_agg_mode",
        "aggregation_tokens": "actor_rollout_ref.actor.loss_scale_factor",
        "advantage": "algorithm.norm_adv_by_std_in_grpo",
        "kl_coef": "actor_rollout_ref.actor.use_kl_loss and kl_loss_coef",
    },
    has_behavior=False,
)


def objective_of(policy_loss: Any) -> ObjectiveConfig:
    """The objective of verl's table `actor_rollout_ref.actor.policy_loss`.

    Args:
        policy_loss: a `verl_plugin.ObjectivePolicyLossConfig`.

    Raises:
        ConfigError: the objective cannot work, or its anchor is not what verl will hand over.
    """
    if not hasattr(policy_loss, "objective"):
        raise ConfigError(
            "verl's own table policy_loss has no objective: set actor_rollout_ref.actor.policy_loss._target_="
            "steadyrl.adapters.verl_plugin.ObjectivePolicyLossConfig"
        )
    objective = settings.objective_for(VERL, policy_loss.objective, policy_loss.steps_per_batch)
    if objective.anchor == "rollout" and not policy_loss.bypass_mode:
        raise ConfigError(
            "verl recomputes old_log_prob, and the objective needs the engine's: set "
            "algorithm.rollout_correction.bypass_mode=True, or anchor=step_start with steps_per_batch"
        )
    if objective.anchor == "step_start" and policy_loss.bypass_mode:
        raise ConfigError(
            "with algorithm.rollout_correction.bypass_mode=True old_log_prob holds the engine's log-probabilities: set "
            "it to False, or the objective's anchor to rollout"
        )
    return objective


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """verl's contract of a policy loss: (0-d loss, metrics). All tensors are [B, W], padded on the right.

    The reduction is verl's own `agg_loss` with the counts of the whole mini-batch. q is taken over this micro-batch,
    with `quantile_scope = "batch"` over the micro-batches that all data-parallel ranks hold at the moment.
    """
    from verl.trainer.ppo.core_algos import agg_loss  # pyright: ignore[reportMissingImports]

    objective = objective_of(config.policy_loss)
    if rollout_is_weights is not None:
        settings.refuse_second_weight(VERL, objective, "set algorithm.rollout_correction.rollout_is=null")

    def reduce(terms: Tensor) -> Tensor:
        return agg_loss(
            loss_mat=terms, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )

    tokens = common.from_padded(
        response_mask,
        logp=log_prob,
        advantage=advantages,
        share=common.shares_of(reduce, log_prob),
        behavior_logp=old_log_prob if objective.anchor == "rollout" else None,
        old_logp=old_log_prob,
        weight=rollout_is_weights,
    )
    outcome = common.objective_loss(objective, tokens, all_reduce=common.sum_over_data_parallel())
    return outcome.loss, common.means(outcome, "actor/")
