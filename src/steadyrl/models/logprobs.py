"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logp(logits: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, in float32 whatever the model's dtype.

    Args:
        logits: [..., V].
        target_ids: [...] int64.
        temperature: the one that the tokens were sampled with; trainer and engine must agree on it.

    Returns:
        [...] float32, with gradient through `logits`.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(scaled, dim=-1)
