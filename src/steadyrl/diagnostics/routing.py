"""How often the trainer would have sent a token to other experts than the engine did.

Per layer: near-ties of the router, which rounding decides, are not spread evenly over the layers. Layers
are vectors (sum [L], count [L]) that pool by addition; `buckets.bucket_means` divides them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadyrl.types import Sums


def disagreement_sums(disagreements: Tensor, tokens: Tensor) -> Sums:
    """Share of tokens with another set of experts, per layer, from the counts of one replayed pass.

    Args:
        disagreements: [L] tokens whose sets differ.
        tokens: [L] tokens compared.
    """
    assert disagreements.shape == tokens.shape, "one count per layer is needed on both sides"
    return {"routing/disagreement": (disagreements.to(torch.float64), tokens.to(torch.float64))}


def overlap(recorded: Tensor, own: Tensor) -> Tensor:
    """|recorded and own| / K of two sets of experts, in any order.

    Args:
        recorded: [.., K] integer; no expert twice.
        own: [.., K] integer.

    Returns:
        [..] float64 in [0, 1].
    """
    shared = (recorded.unsqueeze(-1) == own.unsqueeze(-2)).any(dim=-1)
    return shared.to(torch.float64).mean(dim=-1)


def overlap_sums(recorded: Tensor, own: Tensor) -> Sums:
    """Mean overlap and share of differing sets per layer, and how many tokens differ in some layer.

        routing/overlap       (sum [L], count [L])
        routing/disagreement  (sum [L], count [L])
        routing/any_layer     (sum, count): tokens with another set in at least one of their recorded layers

    Args:
        recorded: [T, L, K] integer, -1 where nothing was recorded.
        own: [T, L, K] integer.
    """
    known = (recorded >= 0).all(dim=-1)
    share = overlap(recorded, own)
    differs = (share < 1) & known
    count = known.sum(dim=0, dtype=torch.float64)
    return {
        "routing/overlap": (torch.where(known, share, 0.0).sum(dim=0), count),
        "routing/disagreement": (differs.sum(dim=0, dtype=torch.float64), count),
        "routing/any_layer": (
            differs.any(dim=-1).sum(dtype=torch.float64),
            known.any(dim=-1).sum(dtype=torch.float64),
        ),
    }
