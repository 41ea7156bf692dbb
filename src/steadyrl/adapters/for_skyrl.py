"""An objective inside SkyRL, as the registered policy loss "steadyrl".

Call `register()` in the entrypoint before `initialize_ray`. The objective is `trainer.algorithm.objective` of a config
whose `AlgorithmConfig` has the fields of `ObjectiveFields`. SkyRL's `rollout_logprobs` are the engine's, its
`old_log_probs` the trainer's own at the start of the batch (anchor "step_start").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError

SKYRL = Framework(
    "SkyRL",
    {"rollout": "rollout_logprobs", "step_start": "old_log_probs"},
    {
        "aggregation": "trainer.algorithm.loss_reduction",
        "aggregation_tokens": "trainer.algorithm.max_seq_len",
        "advantage": "trainer.algorithm.grpo_norm_by_std",
        "kl_coef": "trainer.algorithm.use_kl_loss and kl_loss_coef",
    },
)


@dataclass
class ObjectiveFields:
    """To be mixed into SkyRL's `AlgorithmConfig`."""

    objective: dict[str, Any] = field(default_factory=lambda: {"preset": "sat-gspo"})
    steps_per_batch: int = 1  # optimizer steps: train_batch_size / policy_mini_batch_size * update_epochs_per_batch


def register(name: str = "steadyrl") -> None:
    """Make the loss known to SkyRL under the name that `trainer.algorithm.policy_loss_type` takes."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import (  # pyright: ignore[reportMissingImports]
        PolicyLossRegistry,
    )

    PolicyLossRegistry.register(name, policy_loss)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's contract: (masked sum, metrics). All tensors are [B, W], aligned to the right.

    The advantages come in multiplied by the share of each token (`loss_reduction`). q is taken over this micro-batch,
    with `quantile_scope = "batch"` over the micro-batches that all data-parallel ranks hold at the moment.
    """
    if not hasattr(config, "objective"):
        raise ConfigError("SkyRL's own AlgorithmConfig has no objective: mix ObjectiveFields into it")
    objective = settings.objective_for(SKYRL, config.objective, config.steps_per_batch)
    if objective.log_ratio_coef > 0:
        raise ConfigError(
            "SkyRL puts the denominators into the advantages, so a penalty on the log-ratio would not be divided: set "
            "log_ratio_coef=0"
        )
    if config.off_policy_correction.tis_ratio_type is not None:
        settings.refuse_second_weight(
            SKYRL, objective, "set trainer.algorithm.off_policy_correction.tis_ratio_type=null"
        )
        raise ConfigError("SkyRL's off_policy_correction belongs to its own losses: give the objective a correction")
    needs_engine = objective.anchor == "rollout" or settings.compares_engine(objective)
    if rollout_logprobs is None and needs_engine:
        raise ConfigError(
            "SkyRL has no log-probabilities of the rollout: set generator.sampling_params.logprobs to 0 or more"
        )
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
    tokens = common.from_padded(
        mask,
        logp=log_probs,
        advantage=advantages,
        share=log_probs.new_ones(()),
        behavior_logp=rollout_logprobs,
        old_logp=old_log_probs,
    )
    outcome = common.objective_loss(objective, tokens, all_reduce=common.sum_over_data_parallel())
    return outcome.loss, common.means(outcome)
