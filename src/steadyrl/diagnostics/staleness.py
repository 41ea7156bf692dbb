"""How old the tokens of a batch are: lag = the learner's version minus the version that sampled the token."""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.types import Sums


def lag_sums(learner_version: int, versions: Tensor, loss_mask: Tensor) -> Sums:
    """Mean lag of the active tokens, as (sum, count).

    Args:
        learner_version: optimizer steps completed by the policy being trained.
        versions: [T] int64, the version that sampled each token.
        loss_mask: [T] bool.
    """
    lag = torch.where(loss_mask, learner_version - versions, 0)
    return {"staleness/lag": (lag.sum().to(torch.float64), loss_mask.sum(dtype=torch.float64))}


def lag_histogram(learner_version: int, versions: Tensor, loss_mask: Tensor, largest: int) -> Tensor:
    """Active tokens of each lag 0 .. `largest`: [largest + 1] int64.

    A lag outside that range breaks the promise of the schedule, so it is an error of ours.
    """
    lag = (learner_version - versions)[loss_mask]
    lowest, highest = lag_extremes(learner_version, versions, loss_mask)
    assert lag.numel() == 0 or (lowest >= 0 and highest <= largest), (
        f"lags from {int(lowest)} to {int(highest)} where only 0 to {largest} can occur"
    )
    return torch.bincount(lag, minlength=largest + 1)


def lag_extremes(learner_version: int, versions: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest lag of the active tokens, 0-d int64.

    Without an active token they are the largest and the smallest integer, which pooling by minimum
    and maximum passes over.
    """
    limits = torch.iinfo(torch.int64)
    lag = learner_version - versions
    return (
        torch.where(loss_mask, lag, limits.max).amin() if lag.numel() else lag.new_tensor(limits.max),
        torch.where(loss_mask, lag, limits.min).amax() if lag.numel() else lag.new_tensor(limits.min),
    )
