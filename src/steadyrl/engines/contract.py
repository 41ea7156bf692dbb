"""Do trainer and engine mean the same by a log-probability? The check before the first step and after each broadcast.

A server samples a few responses; the trainer's weights, in the engine's dtype, score the same tokens. Where the numbers
differ by more than two implementations of one model do, the distribution is looked for that the server does report, so
that the message can say what to change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from steadyrl.engines.sampling import kept_tokens, tempered

MOST_SIGMA = 6.0  # by which the likelihood of sampled tokens may be off by chance


@dataclass(frozen=True)
class Reference:
    """What the trainer's weights say about T sampled tokens; all [T] float64, in nats."""

    raw: NDArray[np.float64]  # log-probability without temperature, over all tokens
    tempered: NDArray[np.float64]  # after the temperature, over all tokens
    processed: NDArray[np.float64]  # after the temperature, over what top-k and top-p leave
    mean: NDArray[np.float64]  # of the processed log-probability of a token drawn there, and its variance
    variance: NDArray[np.float64]


@torch.no_grad()
def score(
    model: PreTrainedModel,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Reference:
    """Score the tokens of responses, one response after the other, in one forward pass of `model` in its own dtype.

    Args:
        sequences: a prompt and its response each, as token ids. They are padded on the right, which a causal model
            does not see.

    A token that top-k or top-p of these weights would not leave has the processed log-probability of the least likely
    token that they leave: rounding moves the border.
    """
    rows_of_ids = [torch.tensor([*prompt, *response]) for prompt, response in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows_of_ids, batch_first=True)
    whole = model(input_ids=ids, use_cache=False).logits
    logits = torch.cat([whole[i, len(p) - 1 : len(p) + len(r) - 1] for i, (p, r) in enumerate(sequences)])
    targets = torch.tensor([token for _, response in sequences for token in response]).unsqueeze(1)
    rows = len(targets)
    z = tempered(logits, torch.full((rows,), temperature))
    kept = kept_tokens(z, torch.full((rows,), top_p, dtype=torch.float64), torch.full((rows,), top_k))
    processed = torch.log_softmax(z.masked_fill(~kept, -torch.inf).double(), dim=-1)
    probability, finite = processed.exp(), processed.masked_fill(~kept, 0.0)
    least = processed.masked_fill(~kept, torch.inf).amin(dim=-1)
    chosen = processed.gather(-1, targets).squeeze(1)
    mean = (probability * finite).sum(dim=-1)
    return Reference(
        raw=torch.log_softmax(logits.double(), dim=-1).gather(-1, targets).squeeze(1).numpy(),
        tempered=torch.log_softmax(z.double(), dim=-1).gather(-1, targets).squeeze(1).numpy(),
        processed=torch.where(chosen > -torch.inf, chosen, least).numpy(),
        mean=mean.numpy(),
        variance=((probability * finite.square()).sum(dim=-1) - mean.square()).clamp(min=0).numpy(),
    )


def gap(reported: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Mean absolute difference in nats."""
    return float(np.abs(reported - expected).mean())


def difference(reported: NDArray[np.float64], reference: Reference, tolerance: float) -> str | None:
    """How reported log-probabilities [T] differ from those of the trainer's weights; None within the tolerance."""
    found = gap(reported, reference.processed)
    if found <= tolerance:
        return None
    start = f"its log-probabilities differ from those of the trainer's weights by {found:.3f} nats a token"
    for mode, expected in (("before the temperature", reference.raw), ("before top-p and top-k", reference.tempered)):
        other = gap(reported, expected)
        if other <= min(tolerance, found / 4):
            return (
                f"{start}, and by {other:.3f} where they are taken {mode}: it does not report the distribution that "
                "it samples from (vLLM: start it with --logprobs-mode processed_logprobs; SGLang: without "
                "SGLANG_RETURN_ORIGINAL_LOGPROB)"
            )
    return (
        f"{start}, over {len(reported)} tokens, and engine.probe_tolerance is {tolerance:g}: the weights did not "
        "arrive whole, or the server runs another model or dtype, or samples with settings of its own"
    )


def sampling_difference(reference: Reference, tolerance: float) -> str | None:
    """Whether tokens that a server drew are likelier, or less likely, than draws from the distribution can be.

    The sum of the T processed log-probabilities has a known mean and variance where the tokens are draws from it.
    """
    excess = float((reference.processed - reference.mean).sum())
    limit = MOST_SIGMA * math.sqrt(float(reference.variance.sum())) + tolerance * len(reference.mean)
    if abs(excess) <= limit:
        return None
    direction = "likelier" if excess > 0 else "less likely"
    return (
        f"the tokens that it samples are {direction} than temperature, top-p and top-k of the recipe allow, by "
        f"{abs(excess) / len(reference.mean):.3f} nats a token: it has sampling settings of its own (vLLM: start it "
        "with --generation-config vllm)"
    )
