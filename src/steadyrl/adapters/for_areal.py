"""An objective inside AReaL, in the place of `grpo_loss_fn`.

AReaL has no setting for the loss. `install(objective)` replaces the function that `PPOActor` looks up; under the single
controller it has to run inside the workers. AReaL's `logprobs` are the engine's unless it overwrites them with
recomputed ones (`actor.recompute_logprob` without `use_decoupled_loss`), and its `prox_logp` are the trainer's own at
the start of the batch ("step_start"). AReaL is the one trainer that hands the version of every token to its loss, so
"prox_approx" works here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.settings import Framework
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig

AREAL = Framework(
    "AReaL",
    {"rollout": "logprobs", "step_start": "prox_logp", "prox_approx": "logprobs and versions"},
    {
        "aggregation": "nothing: AReaL takes the mean over tokens",
        "aggregation_tokens": "nothing: AReaL takes the mean over tokens",
        "advantage": "actor.adv_norm",
        "kl_coef": "actor.kl_ctl",
    },
)
NEUTRAL = {"rejection_sampling": None, "m2_threshold": None, "c_clip": None, "use_sapo_loss": False}


def loss(
    logprobs: Tensor,
    entropy: Tensor,
    input_data: dict[str, Any],
    *,
    objective: ObjectiveConfig,
    current_version: int | None = None,
    **own: Any,
) -> Tensor:
    """AReaL's contract of `loss_fn`: packed [T] tensors to the mean over the tokens of this micro-batch.

    q is taken over the micro-batch of this rank: AReaL does not promise that ranks call their losses equally often.
    """
    settings.refuse_without_effect(AREAL, SimpleNamespace(**own), NEUTRAL)
    if "teacher_logp" in input_data:
        raise ConfigError("distillation from a teacher belongs to AReaL's own loss, which is replaced: leave it out")
    mask = input_data["loss_mask"].bool()
    bounds = input_data["cu_seqlens"]
    age = None
    if current_version is not None and "versions" in input_data:
        # AReaL shifts log-probabilities and masks to the position before their token, but not the versions
        age = (current_version - input_data["versions"].roll(-1)).long()
    tokens = common.from_flat(
        mask,
        bounds[1:] - bounds[:-1],
        logp=logprobs,
        advantage=input_data["advantages"],
        share=1 / mask.sum().clamp(min=1).to(logprobs.dtype),
        behavior_logp=input_data["logprobs"],
        old_logp=input_data.get("prox_logp"),
        age=age,
    )
    outcome = common.objective_loss(objective, tokens)
    _log(common.means(outcome), float((entropy.detach() * mask).sum() / mask.sum().clamp(min=1)))
    return outcome.loss


def _log(metrics: Mapping[str, float], entropy: float) -> None:
    from areal.utils import stats_tracker  # pyright: ignore[reportMissingImports]

    stats_tracker.scalar(entropy=entropy, **metrics)


def install(objective: str | Mapping[str, Any] = "sat-grpo", steps_per_batch: int | None = None) -> None:
    """Let AReaL's `PPOActor` minimize the objective.

    Args:
        objective: a preset's name, or the keys of an [objective] table.
        steps_per_batch: `actor.ppo_n_minibatches`, for the anchor "step_start".

    Raises:
        ConfigError: the objective cannot work inside AReaL.
    """
    from areal.trainer.ppo import actor  # pyright: ignore[reportMissingImports]

    actor.grpo_loss_fn = partial(loss, objective=settings.objective_for(AREAL, objective, steps_per_batch))
