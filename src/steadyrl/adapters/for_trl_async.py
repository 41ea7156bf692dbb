"""An objective inside TRL's experimental `AsyncGRPOTrainer`, as a mixin in front of it.

    class Trainer(AsyncGRPOObjective, AsyncGRPOTrainer):
        objective = "sat-gspo"

Made for trl 1.16.0: the packed inputs differ between versions. TRL calls vLLM's log-probabilities `old_log_probs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from steadyrl.adapters import common
from steadyrl.adapters.for_trl import DECIDES
from steadyrl.adapters.settings import Framework, objective_for
from steadyrl.objective.rule import Layout

ASYNC = Framework("TRL's asynchronous trainer", {"rollout": "old_log_probs"}, DECIDES, has_behavior=False)


class AsyncGRPOObjective:
    """In front of `AsyncGRPOTrainer`: ratios against vLLM's log-probabilities, divided by the tokens of the batch."""

    objective: ClassVar[str | Mapping[str, Any]] = "sat-gspo"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steadyrl = objective_for(ASYNC, self.objective)

    def compute_loss(
        self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, args, output: seen.append(output))
        try:  # TRL's own forward pass and metrics; of its loss nothing is used
            super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            hook.remove()
        micro_batches = self.current_gradient_accumulation_steps
        chosen = inputs["token_index"] >= 0
        response = inputs["segment_id"][chosen]
        counted = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1)
        tokens = common.Tokens(
            Layout(torch.ones_like(response, dtype=torch.bool), response, int(response.max()) + 1),
            logp=seen[-1].log_probs.flatten()[inputs["token_index"][chosen]],
            share=(1 / (counted * micro_batches)).expand(response.shape),
            behavior_logp=inputs["old_log_probs"][chosen],
            advantage=inputs["advantages"][chosen],
        )
        all_reduce = common.sum_over()
        outcome = common.objective_loss(self._steadyrl, tokens, all_reduce=all_reduce)
        for name, value in common.means(outcome, all_reduce=all_reduce).items():
            self._metrics["train"][name].append(value)
        if not self.aux_loss_enabled:
            return outcome.loss
        return outcome.loss + self.router_aux_loss_coef * seen[-1].aux_loss / micro_batches
