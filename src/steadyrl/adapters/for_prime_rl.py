"""An objective inside prime-rl, as `trainer.loss` of type "custom".

    [trainer.loss]
    type = "custom"
    import_path = "steadyrl.adapters.for_prime_rl.loss"
    kwargs = { objective = "sat-grpo" }

prime-rl has no policy between engine and trainer: ratios go to `inference_logprobs`, anchor "rollout".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steadyrl.adapters import common
from steadyrl.adapters.settings import Framework, objective_for

PRIME_RL = Framework(
    "prime-rl",
    {"rollout": "inference_logprobs"},
    {
        "aggregation": "nothing: prime-rl divides by the tokens of the batch",
        "aggregation_tokens": "nothing: prime-rl divides by the tokens of the batch",
        "advantage": "the algorithm of the orchestrator",
        "kl_coef": "a ref_kl component of the orchestrator's algorithm",
    },
)
WINDOW_TOKENS = 1 << 17
_recent: dict[int, common.RecentScores] = {}


def loss(inputs: Any, objective: str | Mapping[str, Any] = "sat-grpo", window_tokens: int = WINDOW_TOKENS) -> Any:
    """prime-rl's contract: `LossInputs` of one sequence, all [seq], to `LossOutputs` with the sum over its tokens.

    Args:
        inputs: prime-rl's; `loss_weights` multiply every term.
        objective: a preset's name, or the keys of an [objective] table.
        window_tokens: active tokens of this rank that q is taken over, the current sequence among them.
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]

    chosen = objective_for(PRIME_RL, objective)
    logp = inputs.trainer_logprobs
    tokens = common.from_flat(
        inputs.loss_mask,
        [len(logp)],
        logp=logp,
        advantage=inputs.advantages,
        share=torch.ones_like(logp) if inputs.loss_weights is None else inputs.loss_weights,
        behavior_logp=inputs.inference_logprobs,
    )
    recent = _recent.setdefault(window_tokens, common.RecentScores(window_tokens))
    outcome = common.objective_loss(chosen, tokens, threshold=recent.threshold(chosen, tokens))
    metrics = {name: logp.new_tensor(value) for name, value in common.means(outcome).items()}
    return LossOutputs(loss=outcome.loss, metrics=metrics)
