"""An objective for tinker, as the callable of `TrainingClient.forward_backward_custom`.

    training_client.forward_backward_custom(data, custom_loss("sat-gspo"))

The callable runs on the client and sees every field of `loss_fn_inputs` of each datum, each of them [n]:

    target_tokens       tinker's own
    logprobs            of the sampler, 0 on the prompt
    advantages          any number on the prompt
    mask                1 on the sampled tokens, 0 on the prompt
    versions            optional: the version that sampled each token, for "prox_approx" and quantiles by lag
    old_logprobs        optional: the trainer's own of earlier weights, for "old_actor" and "step_start"
    reference_logprobs  for a KL penalty, kl_coef above 0

One call is one optimizer batch: counts and q are taken over all its data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.adapters import common
from steadyrl.adapters.settings import Framework, needs_age, objective_for
from steadyrl.errors import ConfigError
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.aggregate import aggregation_weight
from steadyrl.types import BatchCounts

OLD = "old_logprobs"
TINKER = Framework(
    "tinker",
    {"rollout": "logprobs", "old_actor": OLD, "step_start": OLD, "prox_approx": "logprobs and versions"},
    {"advantage": "the advantages in your data"},
)
NAMES = {
    "behavior_logp": "logprobs",
    "advantage": "advantages",
    "old_logp": OLD,
    "reference_logp": "reference_logprobs",
}


def custom_loss(
    objective: str | Mapping[str, Any] = "sat-gspo", steps_per_batch: int | None = None, version: int | None = None
) -> Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]:
    """The callable that `forward_backward_custom` takes.

    Args:
        objective: a preset's name, or the keys of an [objective] table; its aggregation and kl_coef count here.
        steps_per_batch: optimizer steps on each batch, for the anchor "step_start".
        version: optimizer steps completed by the weights that are trained, for "prox_approx" and quantiles by lag.

    Raises:
        ConfigError: the objective cannot work, or needs a field that the data does not have.
    """
    table = {"preset": objective} if isinstance(objective, str) else dict(objective)
    chosen = objective_for(TINKER, {"kl_coef": 0.0, **table}, steps_per_batch)  # no reference unless it is asked for

    def loss(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        missing = sorted(_needed(chosen) - set.intersection(*(set(datum.loss_fn_inputs) for datum in data)))
        if missing:
            raise ConfigError(f"this objective needs {', '.join(missing)} in the loss_fn_inputs of every datum")
        if needs_age(chosen) and version is None:
            raise ConfigError("this objective needs the version of the trained weights: custom_loss(..., version=...)")

        def field(name: str) -> Tensor | None:
            if any(name not in datum.loss_fn_inputs for datum in data):
                return None
            return torch.cat([datum.loss_fn_inputs[name].to_torch().reshape(-1) for datum in data])

        mask, versions = field("mask"), field("versions")
        assert mask is not None
        layout = common.layout_of(mask.bool(), [len(part) for part in logprobs])
        counts = BatchCounts(
            int(mask.bool().sum()), sum(bool(datum.loss_fn_inputs["mask"].to_torch().any()) for datum in data)
        )
        tokens = common.Tokens(
            layout,
            logp=torch.cat([part.reshape(-1) for part in logprobs]),
            share=aggregation_weight(chosen, layout, counts).float(),
            age=None if versions is None or version is None else version - versions.long(),
            **{name: field(key) for name, key in NAMES.items()},  # type: ignore[arg-type]
        )
        outcome = common.objective_loss(chosen, tokens, kl_coef=chosen.kl_coef)
        return outcome.loss, common.means(outcome)

    return loss


def _needed(objective: ObjectiveConfig) -> set[str]:
    names = {"mask", "advantages", "logprobs"}
    if objective.needs_old_logp:
        names.add(OLD)
    if needs_age(objective):
        names.add("versions")
    return names | ({"reference_logprobs"} if objective.kl_coef > 0 else set())
