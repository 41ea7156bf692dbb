"""One more token for each of several sequences: drawn, and noted with all that is known about it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from steadyrl.engines.sampling import draw, kept_tokens, tempered
from steadyrl.engines.sequence import Sequence


def extend(sequences: list[Sequence], logits: Tensor, version: int, eos_token_ids: frozenset[int]) -> list[bool]:
    """Draw the next token of each sequence by its own settings and its own random numbers.

    Args:
        logits: [B, V], a row for each sequence.
        version: of the weights that the logits come from.
        eos_token_ids: those that cannot be drawn before `min_response_tokens`.

    Returns:
        [B]: False where the logits are not numbers, so that nothing could be drawn.
    """
    device = logits.device
    temperature = _column(sequences, "temperature", torch.float32, device)
    z = tempered(logits, temperature, _banned(sequences, logits, eos_token_ids))
    kept = None
    if any(sequence.is_restricted for sequence in sequences):
        top_p = _column(sequences, "top_p", torch.float64, device)
        kept = kept_tokens(z, top_p, _column(sequences, "top_k", torch.int64, device))
        z = z.masked_fill(~kept, -torch.inf)
    logp = torch.log_softmax(z, dim=-1)
    finite = torch.isfinite(logp.amax(dim=-1))
    noise = torch.tensor([sequence.noise[len(sequence.tokens)] for sequence in sequences], dtype=torch.float64)
    tokens = draw(torch.where(finite.unsqueeze(1), logp, 0.0), noise.to(device))
    chosen = logp.gather(-1, tokens.unsqueeze(1)).squeeze(1)
    extended = finite.tolist()
    for sequence, token, token_logp, drawn in zip(sequences, tokens.tolist(), chosen.tolist(), extended, strict=True):
        if drawn:
            sequence.tokens.append(token)
            sequence.logp.append(token_logp)
            sequence.versions.append(version)
    rows = [row for row, drawn in enumerate(extended) if drawn]
    _note_likeliest(sequences, rows, logp)
    if kept is not None:
        _note_support(sequences, rows, kept)
    return extended


def _column(sequences: list[Sequence], name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B]: a sampling setting of each sequence."""
    return torch.tensor([getattr(sequence.request, name) for sequence in sequences], dtype=dtype, device=device)


def _banned(sequences: list[Sequence], logits: Tensor, eos_token_ids: frozenset[int]) -> Tensor | None:
    """End tokens before the least number of tokens: [B, V] bool, None where nothing is banned."""
    early = [len(sequence.tokens) < sequence.request.min_response_tokens for sequence in sequences]
    if not any(early):
        return None
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[:, sorted(eos_token_ids)] = torch.tensor(early, device=logits.device).unsqueeze(1)
    return banned


def _note_likeliest(sequences: list[Sequence], rows: list[int], logp: Tensor) -> None:
    most = min(max(sequence.request.top_logprobs for sequence in sequences), logp.shape[1])
    if most == 0:
        return
    values, ids = (part.cpu().numpy() for part in logp.topk(most, dim=-1))
    for row in rows:
        if k := sequences[row].request.top_logprobs:
            sequences[row].top_ids.append(ids[row, :k].astype(np.int32))
            sequences[row].top_logp.append(values[row, :k].copy())


def _note_support(sequences: list[Sequence], rows: list[int], kept: Tensor) -> None:
    """Which tokens could have been drawn, for each sequence that is restricted."""
    ids = kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    sets = np.split(ids, np.cumsum(kept.sum(dim=1).tolist())[:-1])
    for row in rows:
        if sequences[row].is_restricted:
            sequences[row].support.append(sets[row].copy())
