"""From logits to a drawn token: the distribution that is really sampled from, and the draw.

The order is that of the serving engines: logits over the temperature, then top-k, then top-p over what top-k left.
The reported log-probability is that of the renormalized distribution over the tokens that were left, which is
what the trainer has to renormalize over as well (SAT paper, eq. 50).
"""

from __future__ import annotations

import torch
from torch import Tensor


def tempered(logits: Tensor, temperature: Tensor, banned: Tensor | None = None) -> Tensor:
    """Logits over the temperature in float32, and -inf where a token must not be drawn.

    Args:
        logits: [B, V], any float dtype.
        temperature: [B] float32.
        banned: [B, V] bool.
    """
    z = logits.float() / temperature.unsqueeze(1)
    return z if banned is None else z.masked_fill(banned, -torch.inf)


def kept_tokens(z: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """The tokens that top-k and top-p leave, [B, V] bool; at least the likeliest, and none of logit -inf.

    Top-k keeps the k likeliest tokens. Top-p then keeps the smallest set of likeliest tokens with at least the
    share `top_p` of the mass that top-k left. Of equal logits the lower token id counts as likelier. Sums are float64.

    Args:
        z: [B, V] float32, logits over the temperature.
        top_p: [B] float64; 1 keeps everything.
        top_k: [B] int64; 0 keeps everything.
    """
    values, order = z.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[1], device=z.device)
    kept = (top_k.unsqueeze(1) == 0) | (rank < top_k.unsqueeze(1))
    probability = torch.softmax(values.double().masked_fill(~kept, -torch.inf), dim=-1)
    mass_before = probability.cumsum(dim=-1) - probability
    p = top_p.unsqueeze(1)
    kept = kept & ((p >= 1) | (mass_before < p) | (rank == 0)) & (values > -torch.inf)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def draw(logp: Tensor, noise: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution at `noise`.

    Args:
        logp: [B, V] float32 log-probabilities.
        noise: [B] float64, uniform in [0, 1).

    Returns:
        [B] int64. A token of probability 0 is never drawn.
    """
    cumulative = logp.double().exp().cumsum(dim=-1)
    cumulative = cumulative / cumulative[:, -1:]
    return torch.searchsorted(cumulative, noise.unsqueeze(1), right=True).squeeze(1)
