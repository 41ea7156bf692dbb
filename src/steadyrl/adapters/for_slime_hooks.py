"""Corrections and reductions for slime's and miles' own loss, where that loss stays.

    --use-tis --custom-tis-function-path steadyrl.adapters.for_slime_hooks.correction
    --custom-pg-loss-reducer-function-path steadyrl.adapters.for_slime_hooks.sequence_sum

`for_slime.py` replaces the loss; with it, these hooks are not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.adapters import common, settings
from steadyrl.adapters.for_slime import SLIME, Reducer
from steadyrl.errors import ConfigError
from steadyrl.objective.correction import correction_weight
from steadyrl.objective.ratio import token_log_ratio
from steadyrl.objective.rejection import kept_tokens


def correction(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    **_: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """slime's contract of --custom-tis-function-path: correction and rejection of the objective on slime's own loss.

    Rejected tokens stay in the denominators. Without --use-tis only the metrics are made.
    """
    objective = settings.objective_for(SLIME, args.steadyrl_objective, steps_per_batch=2)  # slime's own ratio it is
    if not settings.compares_engine(objective) or any(getattr(r, "of", "") != "mismatch" for r in objective.reject):
        raise ConfigError(
            "--custom-tis-function-path applies a correction, and rejections with of = 'mismatch': set "
            "steadyrl_objective to one with these, for example icepop, mis or geo-rs"
        )
    layout = common.layout_of(torch.cat(list(loss_masks)).to(pg_loss.device), response_lengths)
    mismatch = token_log_ratio(torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs)), layout.loss_mask)
    weight = torch.ones_like(mismatch)
    if objective.correction is not None:
        weight = correction_weight(objective.correction, mismatch, layout)
    for rejection in objective.reject:
        kept = kept_tokens(rejection, torch.zeros_like(mismatch), mismatch, torch.zeros_like(mismatch), layout)
        weight = torch.where(kept, weight, 0.0)
    metrics = {"correction_weight": weight, "correction_zero": (weight == 0).float(), "d_bar": mismatch.abs()}
    return pg_loss * weight if args.use_tis else pg_loss, loss_masks, metrics


def sequence_sum(
    total_lengths: Sequence[int], response_lengths: Sequence[int], loss_masks: Sequence[Tensor], per_token: bool
) -> Reducer:
    """slime's contract of --custom-pg-loss-reducer-function-path: the sum over a response in place of its mean."""
    mask = torch.cat(list(loss_masks)).bool()
    return lambda terms: torch.where(mask.to(terms.device), terms, 0.0).sum()
