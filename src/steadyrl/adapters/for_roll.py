"""An objective inside ROLL, as a mixin in front of a worker of its own.

    class Worker(ROLLObjective, ActorWorker):          # actor_train.worker_cls: my_package.Worker
        objective = "sat-gspo"

ROLL's `infer_logprobs` are the engine's, its old log-probabilities the trainer's own at the start of the batch
("step_start").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError

ROLL = Framework(
    "ROLL",
    {"rollout": "infer_logprobs", "step_start": "old_log_probs"},
    {
        "aggregation": "loss_agg_mode",
        "aggregation_tokens": "loss_agg_mode",
        "advantage": "adv_estimator and norm_mean_type, norm_std_type",
        "kl_coef": "use_kl_loss and kl_loss_coef",
    },
)


class ROLLObjective:
    """In front of `ActorWorker`: its policy term becomes `objective`; KL, entropy and `loss_agg_mode` stay ROLL's."""

    objective: ClassVar[str | Mapping[str, Any]] = "sat-gspo"
    steps_per_batch: ClassVar[int | None] = None  # optimizer steps on each batch, for the anchor "step_start"

    def loss_func(self: Any, data: Any, output_tensor: Tensor) -> tuple[Tensor, dict[str, float]]:
        """ROLL's contract: (loss, metrics). `data.batch` holds [B, S], log-probabilities and advantages [B, S - 1]."""
        from roll.utils.functionals import agg_loss  # pyright: ignore[reportMissingImports]

        objective = settings.objective_for(ROLL, self.objective, self.steps_per_batch)
        config, batch = self.pipeline_config, data.batch
        correction = getattr(config, "train_infer_correction", None)
        if correction is not None and (correction.is_weight.enabled or correction.filters):
            settings.refuse_second_weight(ROLL, objective, "set train_infer_correction.is_weight.enabled to false")
            raise ConfigError("ROLL's train_infer_correction belongs to its own loss: give the objective a correction")
        engine = batch.get("infer_logprobs")
        engine = engine if engine is not None and len(engine) > 0 else None
        if engine is None and (objective.anchor == "rollout" or settings.compares_engine(objective)):
            raise ConfigError("ROLL has no log-probabilities of the engine: make the inference strategy return them")
        mask = batch["response_mask"][:, 1:].long()
        logp = self.strategy.op_compute_log_probs(
            logits=output_tensor, input_ids=batch["input_ids"], attention_mask=batch["response_mask"]
        )
        counts = {name: data.meta_info[name]["response_mask"] for name in ("batch_num_tokens", "global_valid_samples")}

        def reduce(terms: Tensor) -> Tensor:
            return agg_loss(loss_mat=terms, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **counts)

        tokens = common.from_padded(
            mask,
            logp=logp,
            advantage=batch["advantages"],
            share=common.shares_of(reduce, logp),
            behavior_logp=engine,
            old_logp=self.get_old_log_probs_with_cache(data, logp),
            reference_logp=batch.get("ref_log_probs"),
        )
        kl_coef = config.kl_loss_coef if config.use_kl_loss else 0.0
        outcome = common.objective_loss(objective, tokens, kl_coef=kl_coef, all_reduce=common.sum_over_data_parallel())
        loss = outcome.loss
        if config.entropy_loss_coef > 0:
            entropy = self.strategy.op_compute_entropy(logits=output_tensor, attention_mask=batch["response_mask"])
            loss = loss - config.entropy_loss_coef * reduce(torch.where(mask.bool(), entropy, 0.0))
        metrics = common.means(outcome, "actor/")
        return loss, {"actor/total_loss": float(loss.detach()), **metrics}
