"""An objective inside NeMo-RL, as the `loss_fn` that a driver hands to `grpo_train` and `async_grpo_train`.

NeMo-RL's `generation_logprobs` are the engine's, its `prev_logprobs` the trainer's own at the start of the batch
("step_start"). With sequence packing it calls the loss for each response alone, so q is taken over the last
`window_tokens` active tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadyrl.adapters import common
from steadyrl.adapters.settings import Framework, objective_for

NEMO_RL = Framework(
    "NeMo-RL",
    {"rollout": "generation_logprobs", "step_start": "prev_logprobs"},
    {
        "aggregation": "loss_fn.token_level_loss",
        "aggregation_tokens": "loss_fn.token_level_loss",
        "advantage": "grpo.normalize_rewards",
        "kl_coef": "loss_fn.reference_policy_kl_penalty",
    },
)
WINDOW_TOKENS = 1 << 17


class ObjectiveLoss:
    """NeMo-RL's protocol of a loss function, made from the table `loss_fn` of its configuration.

    The table admits further keys; these are read beside `token_level_loss` and `reference_policy_kl_penalty`:

        objective         a preset's name, or the keys of an [objective] table
        steps_per_batch   optimizer steps on each batch, for the anchor "step_start"
        window_tokens     active tokens of this rank that q is taken over, those of the call among them
    """

    def __init__(self, loss_fn: Any) -> None:
        from nemo_rl.algorithms.loss.interfaces import (  # pyright: ignore[reportMissingImports]
            LossInputType,
            LossType,
        )

        given: Mapping[str, Any] = loss_fn if isinstance(loss_fn, Mapping) else loss_fn.model_dump()
        self.objective = objective_for(NEMO_RL, given.get("objective", "sat-gspo"), given.get("steps_per_batch"))
        self.kl_coef = float(given.get("reference_policy_kl_penalty", 0.0))
        self.per_token = bool(given.get("token_level_loss", True))
        self.loss_type = LossType.TOKEN_LEVEL if self.per_token else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB
        self._recent = common.RecentScores(int(given.get("window_tokens", WINDOW_TOKENS)))

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics) of a micro-batch; next_token_logprobs is [B, S - 1], `data` holds [B, S].

        Metrics are divided by the global counts, because NeMo-RL adds them up over micro-batches and ranks.
        """
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        share = 1 / global_valid_toks if self.per_token else common.per_response(mask) / global_valid_seqs
        reference = data["reference_policy_logprobs"][:, 1:] if self.kl_coef > 0 else None
        tokens = common.from_padded(
            mask,
            logp=next_token_logprobs,
            advantage=data["advantages"][:, 1:],
            share=torch.as_tensor(share, dtype=torch.float32),
            behavior_logp=data["generation_logprobs"][:, 1:],
            old_logp=data["prev_logprobs"][:, 1:],
            reference_logp=reference,
        )
        threshold = self._recent.threshold(self.objective, tokens)
        outcome = common.objective_loss(self.objective, tokens, kl_coef=self.kl_coef, threshold=threshold)
        part = float(mask.sum() / global_valid_toks)
        return outcome.loss, {name: value * part for name, value in common.means(outcome).items()}
