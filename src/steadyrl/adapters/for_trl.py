"""An objective inside TRL's `GRPOTrainer`, as a mixin in front of it.

    class Trainer(GRPOObjective, GRPOTrainer):
        objective = "sat-gspo"

Made for trl 1.16.0. TRL's `old_per_token_logps` are the trainer's own scores with the weights that sampled,
`sampling_per_token_logps` are vLLM's; without vLLM the trainer's model samples, and the former stand for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.common import Tokens
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import masked_sum

OLD = "old_per_token_logps"
DECIDES = {
    "aggregation": "loss_type",
    "aggregation_tokens": "max_completion_length, with loss_type='dr_grpo'",
    "advantage": "scale_rewards",
    "kl_coef": "beta",
}
TRL = Framework("TRL", {"rollout": "sampling_per_token_logps", "old_actor": OLD, "step_start": OLD}, DECIDES)
# settings that change TRL's own loss, and the values with which they do nothing
NEUTRAL = {"importance_sampling_level": "token", "top_entropy_quantile": 1.0, "entropy_coef": 0.0} | {
    **dict.fromkeys(("delta", "off_policy_mask_threshold")),
    **dict.fromkeys(("use_adaptive_entropy", "use_liger_kernel"), False),
}
IMAGES = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles")
IMAGES += ("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # what is taken from them is how they divide


class GRPOObjective:
    """In front of `GRPOTrainer`: its loss becomes `objective`, divided as `loss_type` says."""

    objective: ClassVar[str | Mapping[str, Any]] = "sat-gspo"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steadyrl = checked(self)
        self._window_left, self._window_threshold = 0, None

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        micro_batches = self.current_gradient_accumulation_steps if mode == "train" else 1
        all_reduce = common.sum_over()
        if mode == "train" and micro_batches > 1:
            if self._window_left == 0:
                self._window_left = micro_batches
                self._window_threshold = self._threshold(model, micro_batches, all_reduce)
            self._window_left -= 1
        tokens, entropies, aux_loss = self._tokens(model, inputs, micro_batches)
        outcome = common.objective_loss(
            self._steadyrl,
            tokens,
            kl_coef=self.beta,
            all_reduce=all_reduce,
            threshold=self._window_threshold if micro_batches > 1 else None,
        )
        outcome.sums["entropy"] = masked_sum(entropies.flatten(), tokens.layout.loss_mask)
        if aux_loss is not None:
            outcome.sums["aux_loss"] = aux_loss.detach().double(), aux_loss.new_ones((), dtype=torch.float64)
        for name, value in common.means(outcome, all_reduce=all_reduce).items():
            self._metrics[mode][name].append(value)
        return outcome.loss if aux_loss is None else outcome.loss + self.router_aux_loss_coef * aux_loss / micro_batches

    def _tokens(self: Any, model: Any, inputs: dict[str, Any], micro_batches: int) -> tuple[Tokens, Tensor, Any]:
        mask = inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
        images = {name: inputs[name] for name in IMAGES if name in inputs}
        logp, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask.size(1), compute_entropy=True, compute_aux_loss=self.aux_loss_enabled, **images
        )
        old = inputs.get(OLD, logp.detach())
        mask = mask * inputs.get("tool_mask", 1)
        tokens = common.from_padded(
            mask,
            logp=logp,
            share=self._share(inputs, mask, micro_batches),
            behavior_logp=inputs.get("sampling_per_token_logps", old),
            old_logp=old,
            reference_logp=inputs.get("ref_per_token_logps"),
            advantage=inputs["advantages"],
            weight=inputs.get("importance_sampling_ratio"),
        )
        return tokens, entropies, aux_loss

    @torch.no_grad()
    def _threshold(self: Any, model: Any, micro_batches: int, all_reduce: common.AllReduce | None) -> Tensor | None:
        """Of all micro-batches of the optimizer step: they are generated together and lie in TRL's buffer."""
        if not settings.is_batch_relative(self._steadyrl):
            return None
        steps = range(self._step, self._step + micro_batches)
        buffered = [self._buffered_inputs[step % self.args.steps_per_generation] for step in steps]
        tokens = common.joined([self._tokens(model, inputs, micro_batches)[0] for inputs in buffered])
        return common.threshold_across(self._steadyrl, tokens, all_reduce or (lambda counts: counts))

    def _share(self: Any, inputs: dict[str, Any], mask: Tensor, micro_batches: int) -> Tensor:
        """TRL's own denominators; it averages gradients over ranks and does not divide by the micro-batches itself."""
        rows, loss_type = mask.new_tensor(len(mask), dtype=torch.float32), self.loss_type
        if loss_type == "dapo":
            share = micro_batches / self.args.steps_per_generation if self.model.training else 1
            return self.accelerator.num_processes / (inputs["num_items_in_batch"].clamp(min=1) * share)
        if loss_type == "bnpo":
            return 1 / (mask.sum().clamp(min=1) * micro_batches)
        if loss_type == "grpo":
            return common.per_response(mask) / (rows * micro_batches)
        return 1 / (rows * micro_batches * (self.max_completion_length if loss_type == "dr_grpo" else 1))


def checked(trainer: Any) -> ObjectiveConfig:
    """The objective of a `GRPOTrainer`; ConfigError if ratios are all 1, weights double, or arguments do nothing."""
    args = trainer.args
    settings.refuse_without_effect(TRL, args, NEUTRAL | ({"use_bias_correction_kl": False} if args.beta > 0 else {}))
    if args.loss_type not in LOSS_TYPES:
        raise ConfigError(
            f"loss_type={args.loss_type!r} is a rule of TRL's own, which the objective replaces: set it to the way the "
            f"loss is divided, {', '.join(LOSS_TYPES)}"
        )
    fed, window = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    objective = settings.objective_for(TRL, trainer.objective, steps_per_batch=-(-fed // window))
    if args.use_vllm and args.vllm_importance_sampling_correction:
        settings.refuse_second_weight(TRL, objective, "set vllm_importance_sampling_correction=False")
    if not args.use_vllm and settings.compares_engine(objective):
        raise ConfigError(
            "without vLLM the trainer's own model samples and nothing is to be corrected or rejected: leave the "
            "correction and the rejection out of the objective, or set use_vllm=True"
        )
    if window % fed == 0 and not (args.use_vllm and objective.anchor == "rollout"):
        raise ConfigError(
            "with one optimizer step on each generation every ratio is 1 and the rule does nothing: num_iterations=2, "
            "a larger steps_per_generation, or use_vllm=True with anchor = 'rollout'"
        )
    if settings.is_batch_relative(objective) and fed % window:
        raise ConfigError(
            "an optimizer step on two generations cannot be scored whole: make steps_per_generation * num_iterations a "
            "multiple of gradient_accumulation_steps, or set boundary.quantile_scope='microbatch'"
        )
    return objective
