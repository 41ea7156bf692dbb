"""Whether a server's answer can be true. Nothing is repaired: what is wrong is a fault, and is asked for again."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from steadyrl.engines.dialect import Completion, ServerFault
from steadyrl.types import GenerationRequest


def check_completions(
    completions: Sequence[Completion],
    *,
    prompt_tokens: int,
    request: GenerationRequest,
    versions: Collection[str],
    routed_experts: bool,
) -> None:
    """Raises ServerFault unless these are the responses to one prompt of the request.

    Args:
        prompt_tokens: length of the prompt.
        versions: names of the weights that the server may have sampled from.
        routed_experts: whether they were asked for.
    """
    if len(completions) != request.samples_per_prompt:
        raise ServerFault(f"it gave {len(completions)} responses instead of {request.samples_per_prompt}")
    for completion in completions:
        _check_tokens(completion, request)
        _check_versions(completion, versions)
        support = completion.support
        if support is not None and (
            len(support) != len(completion.token_ids)
            or any(token not in ids for token, ids in zip(completion.token_ids, support, strict=True))
        ):
            raise ServerFault("it sampled a token that it does not count among those that top-p and top-k left")
        n, experts = len(completion.token_ids), completion.routed_experts
        if routed_experts and (experts is None or len(experts) != prompt_tokens + n - 1):
            rows = "none" if experts is None else str(len(experts))
            raise ServerFault(
                f"it reports routed experts for {rows} of {prompt_tokens + n - 1} tokens: start it so that it returns "
                "them, or set model.routing_replay=false"
            )


def _check_tokens(completion: Completion, request: GenerationRequest) -> None:
    n = len(completion.token_ids)
    if len(completion.logp) != n:
        raise ServerFault(f"it gave {n} tokens with {len(completion.logp)} log-probabilities")
    bad = [logp for logp in completion.logp if not (math.isfinite(logp) and logp <= 0)]
    if bad:
        raise ServerFault(f"{len(bad)} of {n} log-probabilities are no numbers up to 0, the first is {bad[0]}")
    if n > request.max_response_tokens or (completion.finish == "length") > (n == request.max_response_tokens):
        raise ServerFault(
            f'it gave {n} tokens with finish reason "{completion.finish}" where the limit is '
            f"{request.max_response_tokens}"
        )
    if n == 0 and completion.finish != "canceled":
        raise ServerFault("it gave a response without tokens")
    if any(token < 0 for token in completion.token_ids):
        raise ServerFault("it gave a negative token id")


def _check_versions(completion: Completion, versions: Collection[str]) -> None:
    end = 0
    for span in completion.spans:
        if span.start != end or span.end < span.start:
            raise ServerFault(f"its weight versions do not cover the tokens: after token {end} comes {span}")
        if span.version not in versions and span.end > span.start:
            raise ServerFault(f"it sampled from weights called {span.version!r}, which were not brought to it")
        end = span.end
    if end != len(completion.token_ids):
        raise ServerFault(f"its weight versions cover {end} of {len(completion.token_ids)} tokens")
