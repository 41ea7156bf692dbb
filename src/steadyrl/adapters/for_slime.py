"""An objective inside slime, and the parts that miles, its fork, shares (`for_miles.py`).

    --loss-type custom_loss --custom-loss-function-path steadyrl.adapters.for_slime.policy_loss

The objective stands in the file of --custom-config-path:

    steadyrl_objective: {preset: sat-gspo}

slime's `rollout_log_probs` are the engine's. Its `log_probs` are the trainer's own: with --keep-old-actor of the
weights that the engine holds (anchor "old_actor"), without of the weights at the start of the batch ("step_start").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.common import AllReduce
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig

ANCHORS = {
    "rollout": "rollout_log_probs",
    "old_actor": "log_probs with --keep-old-actor",
    "step_start": "log_probs without --keep-old-actor",
}
DECIDES = {
    "aggregation": "--calculate-per-token-loss for a token mean; without it slime takes the mean over responses",
    "aggregation_tokens": "--custom-pg-loss-reducer-function-path",
    "advantage": "--disable-grpo-std-normalization",
    "kl_coef": "--use-kl-loss --kl-loss-coef",
}
SLIME = Framework("slime", ANCHORS, DECIDES)
NEUTRAL = {"use_tis": False, "get_mismatch_metrics": False, "use_opsm": False, "use_unbiased_kl": False}
Reducer = Callable[[Tensor], Tensor]


def policy_loss(args: Any, batch: dict[str, Any], logits: Tensor, reduce: Reducer) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's contract of --custom-loss-function-path: (sum over samples, metrics). logits: [1, T, V / ranks]."""
    from slime.backends.megatron_utils import loss as slime  # pyright: ignore[reportMissingImports]

    _, scored = slime.get_log_probs_and_entropy(
        logits,
        args=args,
        **{name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")},
        with_entropy=args.entropy_coef != 0,
        **slime.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    return loss_of(SLIME, args, batch, logits, scored, reduce, common.sum_over_data_parallel())


def loss_of(
    framework: Framework,
    args: Any,
    batch: dict[str, Any],
    logits: Tensor,
    scored: dict[str, list[Tensor]],
    reduce: Reducer,
    all_reduce: AllReduce | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and metrics of slime and miles from `scored`, the log-probabilities (and entropies) of the responses."""
    objective = checked(framework, args)
    active = torch.cat(list(batch["loss_masks"])).to(logits.device).bool()
    tokens = common.from_flat(
        active,
        batch["response_lengths"],
        logp=torch.cat(scored["log_probs"]),
        advantage=torch.cat(batch["advantages"]),
        share=common.shares_of(reduce, torch.cat(scored["log_probs"])),
        behavior_logp=_joined(batch.get("rollout_log_probs")),
        old_logp=_joined(batch.get("log_probs")),
        reference_logp=_joined(batch.get("ref_log_probs")),
    )
    kl_coef = args.kl_loss_coef if args.use_kl_loss else 0.0
    outcome = common.objective_loss(objective, tokens, kl_coef=kl_coef, all_reduce=all_reduce)
    loss = outcome.loss if len(active) else outcome.loss + 0 * logits.sum()  # every rank has to run backward
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * reduce(torch.where(active, torch.cat(scored["entropy"]), 0.0))
    # slime adds metrics up like the loss and divides by what the reduction of ones gives
    counted = reduce(active.float())
    metrics = {name: counted * value for name, value in common.means(outcome).items()}
    return loss, {"loss": loss.detach().clone(), **metrics}


def checked(framework: Framework, args: Any) -> ObjectiveConfig:
    """The objective of `args.steadyrl_objective`, checked against the other arguments.

    Raises:
        ConfigError: an argument that does nothing or contradicts the objective, every ratio 1, a weight twice.
    """
    settings.refuse_without_effect(framework, args, NEUTRAL)
    if getattr(args, "context_parallel_size", 1) > 1:
        raise ConfigError("with context parallelism a response lies on several ranks: set --context-parallel-size 1")
    if args.use_kl_loss and args.kl_loss_type not in ("k3", "low_var_kl"):
        raise ConfigError(f"the KL penalty of the objective is k3, not {args.kl_loss_type}: --kl-loss-type low_var_kl")
    steps = -(-args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    objective = settings.objective_for(framework, getattr(args, "steadyrl_objective", "sat-gspo"), steps)
    keeps = bool(getattr(args, "keep_old_actor", False))
    if objective.anchor != "rollout" and (objective.anchor == "old_actor") != keeps:
        raise ConfigError(
            f"{framework.name} scores with other weights than anchor = {objective.anchor!r} means: "
            f"{'leave out' if keeps else 'add'} --keep-old-actor"
        )
    if objective.anchor != "rollout" and getattr(args, "use_rollout_logprobs", False):
        raise ConfigError(
            f"with --use-rollout-logprobs {framework.name} does not score the batch, and anchor = {objective.anchor!r} "
            "needs its scores: leave it out, or set anchor = 'rollout'"
        )
    return objective


def _joined(parts: Sequence[Tensor] | None) -> Tensor | None:
    return torch.cat(list(parts)) if parts else None
