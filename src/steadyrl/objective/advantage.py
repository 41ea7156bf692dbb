"""Advantages from the rewards of a group of responses to one prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def group_advantage(rewards: Tensor, mode: Literal["group_standardized", "group_centered"]) -> Tensor:
    """How much better a response is than its group (GRPO, arXiv 2402.03300).

        group_centered       R - mean
        group_standardized   (R - mean) / (std + 1e-6), std with n - 1

    Args:
        rewards: [P, G], the G responses to each of P prompts.
        mode: one of the above.

    Returns:
        [P, G] float32; a group of equal rewards gets exactly 0.
    """
    # the mean of equal numbers is not always that number, and dividing by the tiny std would blow the difference up
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    values = rewards.to(torch.float64)
    advantage = values - values.mean(1, keepdim=True)
    if mode == "group_standardized":
        advantage = advantage / (values.std(1, keepdim=True) + 1e-6)
    return torch.where(equal, 0.0, advantage).to(torch.float32)
